"""Dataset rows to tokenised prompts, and the cursor that yields them."""
