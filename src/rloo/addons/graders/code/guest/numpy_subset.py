"""A subset of numpy for the judge: the functions with which tests of published datasets compare
floats. The judge uses it if numpy is not among the reward's packages. Programs then cannot create
arrays."""

from __future__ import annotations

import math
import types
from typing import Any

_NUMBERS = (bool, int, float)


class _Array:
    """A placeholder for numpy's array class, without instances."""


def _allclose(
    a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    one, other = ([*x] if isinstance(x, (list, tuple)) else None for x in (a, b))
    if one is not None or other is not None:
        count = max(len(items) for items in (one, other) if items is not None)
        one, other = (
            [x] * count if items is None else items for x, items in ((a, one), (b, other))
        )
        return len(one) == len(other) and all(
            _allclose(x, y, rtol, atol, equal_nan) for x, y in zip(one, other, strict=True)
        )
    if type(a) not in _NUMBERS or type(b) not in _NUMBERS:  # excludes overridden comparisons
        raise TypeError("only numbers, and lists of them, are close")
    if math.isnan(a) or math.isnan(b):
        return equal_nan and math.isnan(a) and math.isnan(b)
    return bool(a == b or (math.isfinite(b) and abs(a - b) <= atol + rtol * abs(b)))


def module() -> types.ModuleType:
    """The module that tests get for `import numpy`."""
    made = types.ModuleType("numpy")
    made.__dict__.update(
        allclose=_allclose, isclose=_allclose, ndarray=_Array,
        inf=math.inf, nan=math.nan, pi=math.pi, e=math.e, isnan=math.isnan,
        float64=type("float64", (float,), {}), float32=type("float32", (float,), {}),
    )  # fmt: skip
    return made
