"""Engines sample completions: `native` (fast, in this package), `hf` (transformers' `generate`) and
`vllm` (on vLLM servers). `engine_registry` builds an engine by its name."""
