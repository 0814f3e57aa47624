"""Rewards that judge whether an answer is correct."""
