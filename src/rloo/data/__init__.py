"""From dataset rows to tokenised prompts, with a cursor over the prompts."""
