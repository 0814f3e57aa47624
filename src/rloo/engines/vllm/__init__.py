"""Sampling over HTTP with unmodified vLLM servers, which the run starts or the user provides."""
