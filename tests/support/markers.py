"""Marks of cases."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

# A case of a parametrized test that is left to .ci/full.
slow = partial(pytest.param, marks=pytest.mark.slow)


def in_pairs(*choices: Iterable[Any]) -> list[Any]:
    """All combinations of some choices, of which every second one is slow. Any two choices keep all
    of their combinations where a third one has as many as two."""
    combinations = itertools.product(*map(enumerate, choices))
    numbered = [zip(*chosen, strict=True) for chosen in combinations]
    return [slow(*case) if sum(numbers) % 2 else case for numbers, case in numbered]


def every_second(cases: Iterable[Any]) -> list[Any]:
    """Cases, of which every second one is slow."""
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [slow(*value) if n % 2 else pytest.param(*value) for n, value in enumerate(values)]


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases, of which all but the `fast` ones are slow."""
    kept = list(fast)
    return [case if case in kept else slow(case) for case in cases]
