"""Whether a mathematical answer is the reference."""
