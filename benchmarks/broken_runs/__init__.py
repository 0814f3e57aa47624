"""Runs that are sick in one known way, and healthy ones, under the eyes of the doctor."""
