"""Values of JSON files that anybody may have written, damaged or made by hand: each is taken as
what it must be, or it is Unfit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

# The value as it is used; raises Unfit for one that cannot be that.
Take = Callable[[Any], Any]
# JavaScript, which draws the report, counts no further.
LARGEST_COUNT = 2**53
LARGEST_NUMBER = 1e100


class UnfitValue(Exception):
    """A value is not what it must be."""


def anything(value: Any, levels: int = 20) -> Any:
    """Any value that is not nested deeper, which no run writes and no recursion survives."""
    if isinstance(value, (dict, list)):
        if levels == 0:
            raise UnfitValue
        for item in value.values() if isinstance(value, dict) else value:
            anything(item, levels - 1)
    return value


def number(value: Any) -> int | float:
    """A finite number, of which a million squares can be added."""
    if number_or_none(value) is None:
        raise UnfitValue
    return value


def number_or_none(value: Any) -> int | float | None:
    """A number; None for null and for what is not finite."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnfitValue
    return value if -LARGEST_NUMBER < value < LARGEST_NUMBER else None


def number_or_nan(value: Any) -> int | float:
    """A number; NaN for null and for what is not finite."""
    taken = number_or_none(value)
    return math.nan if taken is None else taken


def count(value: Any) -> int:
    """A whole number from 0 on."""
    taken = number(value)
    if not 0 <= taken < LARGEST_COUNT or taken != int(taken):
        raise UnfitValue
    return int(taken)


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise UnfitValue
    return value


def switch(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise UnfitValue
    return value


def label(value: Any) -> str | int:
    """A text or a number by which things are told apart."""
    return value if isinstance(value, str) else count(value)


def one_of(*takes: Take) -> Take:
    """What the first of `takes` that can take it makes of it."""

    def take(value: Any) -> Any:
        for each in takes:
            try:
                return each(value)
            except UnfitValue:
                continue
        raise UnfitValue

    return take


def several(each: Take, size: int | None = None) -> Take:
    """A list of such values, of that `size` where one is given."""

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
    """A mapping whose entries are taken by name, those without a name here by `others`. An unfit
    entry is left out; a mapping without one that is `needed` is unfit itself."""
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
