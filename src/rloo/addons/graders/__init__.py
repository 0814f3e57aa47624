"""Rewards that decide whether an answer is right."""
