"""A reward function: `vowels`."""


def vowels(completions, **columns):
    """The share of vowels in each completion, 0 for an empty completion."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in texts]
