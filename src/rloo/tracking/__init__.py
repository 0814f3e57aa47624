"""The output of a run: console, files, loggers, hub."""
