"""Multi-turn completions: the model calls tools, and reads their replies in its next turn."""
