"""Train language models with REINFORCE Leave-One-Out."""

__version__ = "0.1.0"
