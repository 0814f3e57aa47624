"""Validators of values from JSON files, which may be damaged or written by hand. A validator
returns a valid value or raises UnfitValue."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

# Returns the validated value; raises UnfitValue for an invalid one.
Take = Callable[[Any], Any]
# The largest integer that is exact in JavaScript, which draws the report.
LARGEST_COUNT = 2**53
LARGEST_NUMBER = 1e100


class UnfitValue(Exception):
    """Raised for an invalid value."""


def anything(value: Any, levels: int = 20) -> Any:
    """Return any value with at most `levels` levels of nesting. Deeper values, which no run writes,
    would exceed the recursion limit."""
    if isinstance(value, (dict, list)):
        if levels == 0:
            raise UnfitValue
        for item in value.values() if isinstance(value, dict) else value:
            anything(item, levels - 1)
    return value


def number(value: Any) -> int | float:
    """Return a finite number whose square can be added a million times without overflow."""
    if number_or_none(value) is None:
        raise UnfitValue
    return value


def number_or_none(value: Any) -> int | float | None:
    """Return a number; None for null and for numbers that are not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnfitValue
    return value if -LARGEST_NUMBER < value < LARGEST_NUMBER else None


def number_or_nan(value: Any) -> int | float:
    """Return a number; NaN for null and for numbers that are not finite."""
    taken = number_or_none(value)
    return math.nan if taken is None else taken


def count(value: Any) -> int:
    """Return an integer of at least 0."""
    taken = number(value)
    if not 0 <= taken < LARGEST_COUNT or taken != int(taken):
        raise UnfitValue
    return int(taken)


def text(value: Any) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise UnfitValue
    return value


def switch(value: Any) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise UnfitValue
    return value


def label(value: Any) -> str | int:
    """Return an identifier: a string, or an integer of at least 0."""
    return value if isinstance(value, str) else count(value)


def one_of(*takes: Take) -> Take:
    """Return a validator that tries `takes` in order and returns the first valid result."""

    def take(value: Any) -> Any:
        for each in takes:
            try:
                return each(value)
            except UnfitValue:
                continue
        raise UnfitValue

    return take


def several(each: Take, size: int | None = None) -> Take:
    """Return a validator of lists whose values `each` validates, of `size` values if it is
    given."""

    def take(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) != (len(value) if size is None else size):
            raise UnfitValue
        return [each(item) for item in value]

    return take


def record(
    needed: Mapping[str, Take] | None = None,
    known: Mapping[str, Take] | None = None,
    others: Take = anything,
) -> Take:
    """Return a validator of a mapping. `needed` and `known` validate entries by name, `others`
    validates all other entries. Invalid entries are left out. A mapping without a valid entry for
    each name in `needed` is invalid."""
    must = needed or {}
    takes = {**(known or {}), **must}

    def take(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UnfitValue
        taken = {}
        for name, item in value.items():
            try:
                taken[name] = takes.get(name, others)(item)
            except UnfitValue:
                continue
        if not must.keys() <= taken.keys():
            raise UnfitValue
        return taken

    return take
