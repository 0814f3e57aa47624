"""Built-in rewards for the format of a completion: exact text, pattern, tags, length, repetition.
Each `make_...` checks its options once and returns a reward function."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rloo.addons.graders.math.answer_equality import references_of
from rloo.addons.graders.math.answer_extraction import TAGS, tagged
from rloo.rewards.completion_text import text_of
from rloo.types import Text

# One thought and one answer. Neither is blank, and neither has tags inside. Therefore an answer
# cannot contain a second one, and a match takes linear time on any text.
_BLANK = r"[\s\u200b-\u200f\u2060\ufeff]"
_INSIDE = rf"(?!{_BLANK}*</)(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"

_TAGS = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")


def make_exact_match(
    *, strip: bool = True, casefold: bool = False
) -> Callable[..., list[float | None]]:
    """Make a reward function: 1.0 if the completion, or the content of its `<answer>` tags, equals
    the column `answer` (or one item of a list), else 0.0; None if `answer` is None. `strip` ignores
    white space at the beginning and end of both texts. `casefold` ignores case."""

    def normalise(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if casefold else text

    def exact_match_reward(
        completions: Sequence[Text], answer: Sequence[Any]
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for text, wanted in zip(map(text_of, completions), answer, strict=True):
            accepted = set(map(normalise, references_of(wanted)))
            within = tagged(text)
            # Tags count only if no text that could deny the answer follows them.
            is_last = within is not None and not within[2].strip()
            said = {normalise(text), normalise(within[1] if within and is_last else text)}
            rewards.append(float(bool(said & accepted)) if accepted else None)
        return rewards

    exact_match_reward.seeks = TAGS  # type: ignore[attr-defined]
    return exact_match_reward


def make_format(
    *, pattern: str = THINK_ANSWER, max_characters: int = 20_000
) -> Callable[..., list[float]]:
    """Make a reward function: 1.0 if the complete completion matches `pattern`, else 0.0.

    A dot also matches a line break. The default pattern is one `<think>...</think>` followed by one
    `<answer>...</answer>`, neither of them blank. A completion of more than `max_characters` scores
    0. This limits the time of a pattern with quadratic cost on hostile text.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(
            f"pattern {pattern!r} is not a regular expression: {error} (option pattern of format)"
        ) from error

    def format_reward(completions: Sequence[Text]) -> list[float]:
        return [
            float(len(text) <= max_characters and compiled.fullmatch(text) is not None)
            for text in map(text_of, completions)
        ]

    format_reward.seeks = re.sub(r"\\(.)", r"\1", pattern)  # type: ignore[attr-defined]
    return format_reward


def tag_count_reward(completions: Sequence[Text]) -> list[float]:
    """For each completion, 0.25 for each of the four tags of a thought and an answer that occurs
    exactly once with its line breaks. This is open-r1's `tag_count`."""
    texts = map(text_of, completions)
    return [sum(text.count(tag) == 1 for tag in _TAGS) / len(_TAGS) for text in texts]


tag_count_reward.seeks = "".join(_TAGS)  # type: ignore[attr-defined]


def make_length(*, target_min: int = 0, target_max: int) -> Callable[..., list[float]]:
    """Make a reward function: 1.0 for a length of `target_min..target_max` tokens. Outside this
    range the reward decreases linearly, to 0.0 at 0 tokens and at twice `target_max`."""
    if not 0 <= target_min <= target_max or target_max == 0:
        raise ValueError(
            f"target_min is {target_min} and target_max {target_max}; the band needs "
            "0 <= target_min <= target_max and target_max above 0 (options of length)"
        )

    def score(length: int) -> float:
        if length < target_min:
            return length / target_min
        return min(1.0, max(0.0, 2.0 - length / target_max))

    def length_reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [score(len(ids)) for ids in completion_ids]

    return length_reward


def make_soft_overlong(*, max_tokens: int, cache_tokens: int) -> Callable[..., list[float]]:
    """Make a reward function: 0.0 up to `max_tokens - cache_tokens` tokens. Above that length, the
    reward decreases linearly to -1.0 at `max_tokens`. This is DAPO's soft overlong punishment (Yu
    et al. 2025, arXiv 2503.14476, equation 13)."""
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens is {cache_tokens} and max_tokens {max_tokens}; the penalty needs "
            "0 < cache_tokens <= max_tokens (options of soft_overlong)"
        )

    def soft_overlong_reward(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = max_tokens - cache_tokens
        return [min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)) for ids in completion_ids]

    return soft_overlong_reward


def make_repetition(
    *, ngram: int = 3, max_penalty: float = 1.0, words: bool = False
) -> Callable[..., list[float]]:
    """Make a reward function: -`max_penalty` times the share of n-grams that occurred earlier in
    the completion; 0.0 if all n-grams are distinct, or if the completion has fewer than `ngram`
    units. Units are tokens, or with `words` the lower-case words between white space (Yeo et al.
    2025, arXiv 2502.03373, appendix C.2)."""
    if ngram < 1 or max_penalty < 0:
        raise ValueError(
            f"ngram is {ngram} and max_penalty {max_penalty}; they need to be at least 1 and at "
            "least 0 (options of repetition)"
        )

    def repetition_reward(
        completions: Sequence[Text], completion_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        rewards = []
        for text, ids in zip(completions, completion_ids, strict=True):
            units = text_of(text).lower().split() if words else ids
            grams = [tuple(units[i : i + ngram]) for i in range(len(units) - ngram + 1)]
            repeated = 1.0 - len(set(grams)) / len(grams) if grams else 0.0
            rewards.append(0.0 - max_penalty * repeated)
        return rewards

    return repetition_reward
