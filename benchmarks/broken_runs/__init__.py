"""Tests of the doctor: runs that each have one known problem, and healthy runs."""
