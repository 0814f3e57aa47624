"""Completions of several turns: the model speaks, its tools answer, and so on (`engine.py`)."""
