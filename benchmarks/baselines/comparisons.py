"""Statistics of the planned comparisons: paired by seed, with Holm's correction, and the point of a
curve at which a mark is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from scipy import stats

CONFIDENCE = 0.95
# The mark: the start plus this part of what the best arm gains.
MARK = 0.8


@dataclass(frozen=True)
class Paired:
    """The mean difference, its 95 % interval, and the p value of the two-sided paired t test."""

    mean: float
    low: float
    high: float
    p: float


def compare_paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """The difference ours - theirs. Equal places are equal seeds. Raises ValueError with fewer than
    two pairs, since their spread is then unknown."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(differences) < 2:
        raise ValueError(f"{len(differences)} pairs; the spread of differences needs at least 2")
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    if error == 0.0:
        return Paired(mean, mean, mean, 1.0 if mean == 0.0 else 0.0)
    law = stats.t(len(differences) - 1)
    half = float(law.ppf(0.5 + CONFIDENCE / 2)) * error
    return Paired(mean, mean - half, mean + half, 2 * float(law.sf(abs(mean) / error)))


def compare_ratios(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """As `compare_paired`, for the geometric mean of ours / theirs. Values are positive."""
    found = compare_paired([math.log(v) for v in ours], [math.log(v) for v in theirs])
    return Paired(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.p)


def correct_holm(values: Mapping[Any, float]) -> dict[Any, float]:
    """The p values of a family after Holm's correction (Holm 1979): in ascending order, the largest
    so far of p times the number of hypotheses that are left, at most 1."""
    found: dict[Any, float] = {}
    largest = 0.0
    for place, key in enumerate(sorted(values, key=lambda key: values[key])):
        largest = max(largest, min(1.0, values[key] * (len(values) - place)))
        found[key] = largest
    return found


def find_crossing(places: Sequence[float], values: Sequence[float], mark: float) -> float | None:
    """The first place at which the curve through the points reaches `mark`, between two points by a
    line. None if it does not."""
    if values[0] >= mark:
        return places[0]
    for left, right in pairwise(range(len(values))):
        if values[right] >= mark:
            part = (mark - values[left]) / (values[right] - values[left])
            return places[left] + part * (places[right] - places[left])
    return None


def value_at(places: Sequence[float], values: Sequence[float], place: float) -> float | None:
    """The value of the curve at `place`, between two points by a line. None outside the curve."""
    if not places[0] <= place <= places[-1]:
        return None
    for left, right in pairwise(range(len(values))):
        if place <= places[right]:
            part = (place - places[left]) / (places[right] - places[left])
            return values[left] + part * (values[right] - values[left])
    return values[-1]
