"""Confidence intervals for the differences between arms. The statistical unit is a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

from scipy import stats


def difference_interval(
    ours: Sequence[float], theirs: Sequence[float], *, comparisons: int = 1
) -> list[float] | None:
    """[difference of means ours - theirs, low, high]: Welch's interval. The statistical unit is a
    run.

    `comparisons` such intervals hold simultaneously with 95 % confidence (Bonferroni). None if a
    side has fewer than two runs, since its spread is then unknown.
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
    half = float(stats.t.ppf(1 - 0.05 / (2 * comparisons), freedom)) * math.sqrt(total)
    return [difference, difference - half, difference + half]
