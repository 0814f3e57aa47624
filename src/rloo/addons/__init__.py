"""Parts that the trainer can live without. None of them is imported by the core."""
