"""The options of a run, read and checked. Imports neither torch nor transformers."""
