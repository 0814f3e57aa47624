"""Countdown with visible search: the embedded demonstration task.

Responsible for the problems, their three disjoint sets, the reward and the place of the base model.
It knows nothing about tokens, models or training.

A prompt gives three numbers and a target, `3 7 12 -> 36 :`. A completion is a sequence of
attempts, each of which combines two of the numbers, `7 + 3 = 10 ; 12 - 7 = 5 ; 12 * 3 = 36`. The
last attempt is the answer. The shipped base model knows the arithmetic and recognises a hit, but it
usually gives up after an attempt or two; only the reward says that to search on pays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Split = Literal["warm", "train", "heldout"]

SMALLEST_NUMBER = 2
LARGEST_NUMBER = 20
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
SEPARATOR = ";"

_NUM_HELDOUT = 512
_NUM_WARM = 4000
# Nine attempts, all that three numbers allow, are under 200 characters.
_MAX_CHARACTERS = 2000


class Attempt(NamedTuple):
    """One line of the search, `left operation right = value`."""

    left: int
    operation: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.left} {self.operation} {self.right} = {self.value}"


def list_attempts(numbers: Sequence[int]) -> list[Attempt]:
    """Every way to combine two of the (distinct) numbers, the larger one on the left."""
    return [
        Attempt(left, operation, right, compute(left, right))
        for right, left in combinations(sorted(numbers), 2)
        for operation, compute in OPERATIONS.items()
    ]


def make_problems(split: Split) -> list[dict[str, Any]]:
    """The problems of one split, always the same ones in the same order.

    Columns: `prompt` (text), `numbers` (three distinct integers, in the order of the prompt) and
    `target`. A problem is the unordered set of its numbers and its target; the whole space, 8,542
    problems, is ordered by a hash of that and cut: 512 `heldout`, 4,000 `warm` (seen by the base
    model in its supervised training), the rest `train`.

    Raises ValueError for an unknown split.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(get_args(Split))}")
    problems = sorted(_list_problems(), key=_digest)
    first_train = _NUM_HELDOUT + _NUM_WARM
    bounds = {
        "heldout": slice(None, _NUM_HELDOUT),
        "warm": slice(_NUM_HELDOUT, first_train),
        "train": slice(first_train, None),
    }
    return [_make_row(numbers, target) for numbers, target in problems[bounds[split]]]


def countdown_reward(
    completions: Sequence[str], numbers: Sequence[Sequence[int]], target: Sequence[int], **_: Any
) -> list[float]:
    """1.0 where the last attempt of a completion solves its problem, else 0.0.

    An attempt solves it when it takes two different given numbers, states the right result and the
    result is the target. Everything that is not exactly `a + b = c` (one of + - *, plain decimal
    integers, single tokens apart by white space) is 0.0, and so is a text of over 2,000 characters.
    """
    return [
        float(_is_solved(text, given, goal))
        for text, given, goal in zip(completions, numbers, target, strict=True)
    ]


def base_model_path() -> Path:
    """The folder of the shipped base model, in Hugging Face format, tokenizer included."""
    return Path(__file__).parent / "countdown_base"


def _list_problems() -> list[tuple[tuple[int, ...], int]]:
    triples = combinations(range(SMALLEST_NUMBER, LARGEST_NUMBER + 1), 3)
    return [
        (numbers, target)
        for numbers in triples
        for target in {attempt.value for attempt in list_attempts(numbers)}
    ]


def _digest(problem: tuple[Sequence[int], int]) -> bytes:
    numbers, target = problem
    return hashlib.sha256(f"countdown {sorted(numbers)} {target}".encode()).digest()


def _make_row(numbers: Sequence[int], target: int) -> dict[str, Any]:
    # Shown in an order that says nothing about size, and yet is the same in every process.
    shown = sorted(numbers, key=lambda number: _digest(([number, *numbers], target)))
    return {
        "prompt": f"{' '.join(map(str, shown))} -> {target} :",
        "numbers": shown,
        "target": target,
    }


def _is_solved(text: str, numbers: Sequence[int], target: int) -> bool:
    if len(text) > _MAX_CHARACTERS:
        return False
    words = text.rsplit(SEPARATOR, maxsplit=1)[-1].split()
    if len(words) != 5:
        return False
    left, operation, right, equals, result = words
    if equals != "=" or operation not in OPERATIONS:
        return False
    # The text is compared with what we print and never converted: `007` or `٧` is nobody's number.
    given = {str(number): number for number in numbers}
    if left == right or left not in given or right not in given:
        return False
    value = OPERATIONS[operation](given[left], given[right])
    return value == target and result == str(target)
