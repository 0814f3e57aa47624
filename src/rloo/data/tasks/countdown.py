"""Countdown with visible search: the embedded demonstration task.

A prompt gives three numbers and a target, `3 7 12 -> 36 :`. A completion is a sequence of
attempts, each of which combines two of the numbers, `7 + 3 = 10 ; 12 - 7 = 5 ; 12 * 3 = 36`. The
last attempt is the answer. The base model knows the arithmetic and recognises a hit, but it usually
gives up after one or two attempts; the reward teaches it to keep searching.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from operator import add, mul, sub
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Split = Literal["warm", "train", "heldout"]

SMALLEST_NUMBER = 2
LARGEST_NUMBER = 20
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul}
SEPARATOR = ";"

_NUM_HELDOUT = 512
_NUM_WARM = 4000
# All nine attempts that three numbers allow take less than 200 characters.
_MAX_CHARACTERS = 2000


class SearchLine(NamedTuple):
    """One line of the search, `left operation right = value`."""

    left: int
    operation: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.left} {self.operation} {self.right} = {self.value}"


def list_attempts(numbers: Sequence[int]) -> list[SearchLine]:
    """All ways to combine two of the (distinct) numbers, with the larger one on the left."""
    return [
        SearchLine(left, operation, right, compute(left, right))
        for right, left in combinations(sorted(numbers), 2)
        for operation, compute in OPERATIONS.items()
    ]


def make_problems(split: Split) -> list[dict[str, Any]]:
    """The problems of one split, always in the same order.

    Columns: `prompt` (text), `numbers` (three distinct integers, in the order of the prompt) and
    `target`. A problem is a set of numbers with a target. All 8,542 problems are sorted by a hash
    and divided: 512 `heldout`, 4,000 `warm` (used in the base model's supervised training), the
    rest `train`. Raises ValueError for an unknown split.
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
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **_: Any,
) -> list[float]:
    """1.0 if the last attempt of a completion, a text or a conversation's last message, solves its
    problem, else 0.0.

    An attempt solves the problem if it combines two different given numbers, states the correct
    result, and that result is the target. Anything but exactly `a + b = c` (one of + - *, plain
    decimal integers, separated by white space) scores 0.0, as does a text of over 2,000 characters.
    """
    problems = zip(completions, numbers, target, strict=True)
    return [float(_is_solved(_text_of(said), given, goal)) for said, given, goal in problems]


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
    # The order shown reveals nothing about size and is the same in every process.
    shown = sorted(numbers, key=lambda number: _digest(([number, *numbers], target)))
    prompt = f"{' '.join(map(str, shown))} -> {target} :"
    return {"prompt": prompt, "numbers": shown, "target": target}


def _text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _is_solved(text: str, numbers: Sequence[int], target: int) -> bool:
    if len(text) > _MAX_CHARACTERS:
        return False
    words = text.rsplit(SEPARATOR, maxsplit=1)[-1].split()
    if len(words) != 5:
        return False
    left, operation, right, equals, result = words
    if equals != "=" or operation not in OPERATIONS:
        return False
    # Texts are compared, never converted to numbers, so that `007` or `٧` do not count.
    given = {str(number): number for number in numbers}
    if left == right or left not in given or right not in given:
        return False
    value = OPERATIONS[operation](given[left], given[right])
    return value == target and result == str(target)
