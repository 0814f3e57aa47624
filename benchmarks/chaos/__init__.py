"""Faults that are made on purpose, counted: python -m benchmarks.chaos."""
