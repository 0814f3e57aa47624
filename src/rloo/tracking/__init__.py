"""What a run shows and records: console, files, loggers, hub."""
