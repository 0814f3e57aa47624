"""Compatibility with the options and interfaces of TRL, transformers and accelerate."""
