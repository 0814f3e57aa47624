"""A plugin of each kind for rloo."""
