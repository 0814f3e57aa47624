"""Sampling over HTTP with unmodified vLLM servers, started by the run or given by the user."""
