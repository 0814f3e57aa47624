"""What is wrong with a run: rules over its records, each a pure function."""
