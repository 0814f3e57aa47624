"""The reward `math`: decides whether a mathematical answer equals the reference."""
