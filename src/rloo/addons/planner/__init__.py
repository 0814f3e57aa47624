"""Predicts the time and the memory of a run before it starts."""
