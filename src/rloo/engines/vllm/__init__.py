"""Sampling with vLLM's servers over HTTP: unmodified, ours or given."""
