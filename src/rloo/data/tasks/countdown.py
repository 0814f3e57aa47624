"""Countdown with visible search: the embedded demonstration task.

A prompt gives three numbers and a target, `3 7 12 -> 36 :`. A completion is a sequence of attempts,
`7 + 3 = 10 ; 12 - 7 = 5 ; 12 * 3 = 36`. Each attempt combines two of the numbers. The last attempt
is the answer. The base model knows the arithmetic and recognises a correct attempt, but it usually
stops after one or two attempts. The reward teaches the model to try more.
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
# Three numbers allow nine attempts, which together have less than 200 characters.
_MAX_CHARACTERS = 2000


class SearchLine(NamedTuple):
    """One attempt, `left operation right = value`."""

    left: int
    operation: str
    right: int
    value: int

    def __str__(self) -> str:
        return f"{self.left} {self.operation} {self.right} = {self.value}"


def list_attempts(numbers: Sequence[int]) -> list[SearchLine]:
    """All ways to combine two of the (distinct) numbers, with the larger number on the left."""
    return [
        SearchLine(left, operation, right, compute(left, right))
        for right, left in combinations(sorted(numbers), 2)
        for operation, compute in OPERATIONS.items()
    ]


def make_problems(split: Split) -> list[dict[str, Any]]:
    """The problems of one split, always in the same order.

    Columns: `prompt` (text), `numbers` (three distinct integers, in the order of the prompt) and
    `target`. A problem is a set of numbers with a target. All 8,542 problems are sorted by a hash
    and divided: 512 `heldout`, 4,000 `warm` (for the supervised training of the base model), the
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
    """1.0 if the last attempt of a completion solves the problem, else 0.0. A completion is a text
    or a list of messages, of which the last message counts.

    An attempt solves the problem if it combines two different given numbers, states the correct
    result, and that result is the target. The form must be exactly `a + b = c`: one of + - *, plain
    decimal integers, separated by white space. Other forms and texts of over 2,000 characters score
    0.0.
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
    # The order in the prompt does not depend on the sizes, and is the same in every process.
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
