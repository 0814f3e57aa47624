"""The reward `math`: checks whether a mathematical answer equals the reference."""
