"""`rloo plan` against the runs that it speaks of."""
