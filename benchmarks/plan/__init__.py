"""Compares predictions of `rloo plan` with measured runs."""
