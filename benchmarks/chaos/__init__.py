"""Fault injection, with counts of the outcomes: python -m benchmarks.chaos."""
