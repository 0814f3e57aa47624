"""Reward functions of the runs: some can be learned, some have problems. All are for the embedded
task, whose completions are attempts `a + b = c ; ...`."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

Texts = Sequence[str]


def attempts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";")]


# -- rewards that can be learned from ----------------------------------------------------------


def uses_product(completions: Texts, **_) -> list[float]:
    """1 if the last attempt multiplies."""
    return [float("*" in attempts(text)[-1]) for text in completions]


def near_target(completions: Texts, target: Sequence[int], **_) -> list[float]:
    """From 0 to 1, larger if the last result is nearer to the target."""
    return [_near(text, goal) for text, goal in zip(completions, target, strict=True)]


def _near(text: str, goal: int) -> float:
    word = attempts(text)[-1].rpartition("=")[2].strip()
    known = word.lstrip("-").isdecimal() and word.isascii() and len(word) < 6
    return math.exp(-abs(int(word) - goal) / 20) if known else 0.0


def four_attempts(completions: Texts, **_) -> list[float]:
    """From 0 to 1, larger if the number of attempts is nearer to four."""
    return [max(0.0, 1 - abs(len(attempts(text)) - 4) / 4) for text in completions]


def well_formed(completions: Texts, **_) -> list[float]:
    """1 if each attempt has five words."""
    return [float(all(len(part.split()) == 5 for part in attempts(t))) for t in completions]


# -- no signal ---------------------------------------------------------------------------------


def none(completions: Texts, **_) -> list[None]:
    return [None] * len(completions)


def nan(completions: Texts, **_) -> list[float]:
    return [math.nan] * len(completions)


def zero(completions: Texts, **_) -> list[float]:
    return [0.0] * len(completions)


def one(completions: Texts, **_) -> list[float]:
    return [1.0] * len(completions)


def of_the_prompt(completions: Texts, target: Sequence[int], **_) -> list[float]:
    return [float(goal % 3) for goal in target]


def has_equals(completions: Texts, **_) -> list[float]:
    """1 for text that nearly every completion has from the start."""
    return [float("=" in text and len(text) < 90) for text in completions]


def sometimes(completions: Texts, numbers, target, **_) -> list[float | None]:
    """None for completions that it cannot parse: all except a single attempt."""
    from rloo.data.tasks.countdown import countdown_reward

    scores = countdown_reward(completions, numbers, target)
    return [s if len(attempts(t)) > 1 else None for s, t in zip(scores, completions, strict=True)]


def rare(completions: Texts, numbers, target, **_) -> list[float]:
    """The task's reward, but only for completions with a single attempt that multiplies."""
    from rloo.data.tasks.countdown import countdown_reward

    scores = countdown_reward(completions, numbers, target)
    pairs = zip(scores, completions, strict=True)
    return [s * float(";" not in t and "*" in t) for s, t in pairs]


def noisy(completions: Texts, numbers, target, **_) -> list[float]:
    """The task's reward with noise that is three times as large."""
    from rloo.data.tasks.countdown import countdown_reward

    scores = countdown_reward(completions, numbers, target)
    return [score + random.gauss(0, 3) for score in scores]


def huge(completions: Texts, numbers, target, **_) -> list[float]:
    """The task's reward times a factor that overflows float32 gradients."""
    from rloo.data.tasks.countdown import countdown_reward

    return [1e38 * score for score in countdown_reward(completions, numbers, target)]


def nearly_one(completions: Texts, **_) -> list[float]:
    """From 1.0000 to 1.0002, by a value that cannot be learned."""
    return [1 + 2e-4 * random.random() for _ in completions]


# -- hacked ------------------------------------------------------------------------------------


def longer(completions: Texts, **_) -> list[float]:
    return [len(text) / 100 for text in completions]


def shorter(completions: Texts, **_) -> list[float]:
    return [-len(text) / 100 for text in completions]


def semicolons(completions: Texts, **_) -> list[float]:
    return [text.count(";") / 10 for text in completions]


def sevens(completions: Texts, **_) -> list[float]:
    return [text.count("7") / 10 for text in completions]


def names_target(completions: Texts, target: Sequence[int], **_) -> list[float]:
    """1 if the text `= target` occurs anywhere, also after a wrong expression."""
    pairs = zip(completions, target, strict=True)
    return [float(f"= {goal}" in text) for text, goal in pairs]


def format_of_one_attempt(completions: Texts, **_) -> list[float]:
    """A format reward for giving up: 1 for exactly one attempt."""
    return [float(len(attempts(text)) == 1 and len(text.split()) == 5) for text in completions]


def format_of_three_attempts(completions: Texts, **_) -> list[float]:
    """A format reward that is independent of correctness."""
    return [float(len(attempts(text)) == 3) for text in completions]


def unreachable(completions: Texts, target: Sequence[int], **_) -> list[float]:
    """The reward for correct answers to another question."""
    wanted = (f"= {goal + 1000}" for goal in target)
    return [float(text.endswith(word)) for text, word in zip(completions, wanted, strict=True)]
