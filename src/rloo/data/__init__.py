"""Rows of a dataset to tokenised prompts, and the cursor that draws them."""
