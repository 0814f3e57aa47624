"""Marks of cases."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest

# A case of a parametrized test that is left to .ci/full.
slow = partial(pytest.param, marks=pytest.mark.slow)


def in_pairs(*choices: Iterable[Any]) -> list[Any]:
    """All combinations of some choices, of which half are slow: of any two choices, the others have
    all combinations."""
    return [case if fast else slow(*case) for case, fast in _halved(*choices)]


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Cases of one choice, of which every second one is slow."""
    return [case if fast else slow(case) for (case,), fast in _halved(cases)]


def _halved(*choices: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], bool]]:
    for numbered in itertools.product(*map(enumerate, choices)):
        numbers, case = zip(*numbered, strict=True)
        yield case, sum(numbers) % 2 == 0
