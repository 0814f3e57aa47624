"""A complete run: trainer, training loop, checkpoints, evaluation, run folder."""
