"""Commands other than training."""
