"""The reward `code`: what the model wrote is run, behind a wall, and judged by tests."""
