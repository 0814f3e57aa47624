"""Weights that are sharded over ranks: FSDP2 and DeepSpeed ZeRO."""
