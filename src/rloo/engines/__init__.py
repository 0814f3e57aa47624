"""Engines sample completions: `native` (fast, our own), `hf` (transformers' `generate`), and
`vllm`, on servers of vLLM. `registry` makes the one that a run names."""
