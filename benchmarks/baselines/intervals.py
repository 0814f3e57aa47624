"""Intervals for what single runs and single prompts tell. Plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance


def difference_interval(
    ours: Sequence[float], theirs: Sequence[float], *, comparisons: int = 1
) -> list[float] | None:
    """[difference of means ours - theirs, low, high]: Welch's interval, whose units are the runs.

    `comparisons` such intervals hold together with 95 % (Bonferroni). None with fewer than two runs
    on a side, from which no spread can be seen.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    parts = [variance(values) / len(values) for values in (ours, theirs)]
    difference, total = fmean(ours) - fmean(theirs), sum(parts)
    if total == 0:
        return [difference] * 3
    freedom = total**2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, theirs), strict=True)
    )
    half = student_quantile(1 - 0.05 / (2 * comparisons), freedom) * math.sqrt(total)
    return [difference, difference - half, difference + half]


def student_quantile(p: float, freedom: float) -> float:
    """The p-quantile, p > 0.5, of Student's distribution with `freedom` >= 1, to about 1e-9.

    With t = sqrt(freedom) tan(a) the density is cos(a) ** (freedom - 1) on a bounded range.
    """
    whole = _cosine_integral(math.pi / 2, freedom - 1)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 + _cosine_integral(middle, freedom - 1) / (2 * whole)
        low, high = (middle, high) if below < p else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _cosine_integral(end: float, power: float, pieces: int = 1000) -> float:
    """Of cos ** power from 0 to `end` (at most pi / 2), by Simpson's rule."""
    width = end / pieces

    def value(index: int) -> float:
        return max(0.0, math.cos(index * width)) ** power

    odd = sum(value(index) for index in range(1, pieces, 2))
    even = sum(value(index) for index in range(2, pieces, 2))
    return width / 3 * (value(0) + 4 * odd + 2 * even + value(pieces))
