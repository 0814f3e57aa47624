"""The options of a run: reading and checks. Imports neither torch nor transformers."""
