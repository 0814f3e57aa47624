"""Histograms of a rollout's rewards, advantages and lengths, and their sums over common bins."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

# [lowest value, highest value, number of values]
Bin = tuple[float, float, float]
NUM_BINS = 32


def histogram(values: Iterable[float]) -> list[Bin]:
    """Return the bins of the finite values that are not empty, in order. Up to 32 different values
    have a bin each, so that rewards of 0 and 1 stay exact. More values have 32 equal bins between
    the lowest and the highest."""
    finite = sorted(value for value in values if math.isfinite(value))
    counts = Counter(finite)
    if len(counts) <= NUM_BINS:
        return [(value, value, counts[value]) for value in sorted(counts)]
    low, high = finite[0], finite[-1]
    width = (high - low) / NUM_BINS
    places = Counter(min(NUM_BINS - 1, int((value - low) / width)) for value in finite)
    return [(low + n * width, low + (n + 1) * width, places[n]) for n in sorted(places)]


def add_into(edges: Sequence[float], bins: Iterable[Bin]) -> list[float]:
    """Return the counts of `bins` in the equal bins between `edges`. A bin that several of them
    cover is divided by length. The values must lie between the first and the last edge."""
    counts = [0.0] * (len(edges) - 1)
    start, width = edges[0], (edges[-1] - edges[0]) / len(counts)

    def place(value: float) -> int:
        return max(0, min(len(counts) - 1, int((value - start) / width)))

    for low, high, count in bins:
        if low == high:
            counts[place(low)] += count
            continue
        for n in range(place(low), place(high) + 1):
            inside = min(high, edges[n + 1]) - max(low, edges[n])
            counts[n] += count * max(0.0, inside) / (high - low)
    return counts


def quartiles(bins: Iterable[Bin]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile: the smallest value that this
    share of all values does not exceed. They are exact for bins of single values. In other bins the
    values are taken as evenly spread."""
    inside = sorted((each for each in bins if each[2] > 0), key=lambda each: each[0] + each[1])
    total = math.fsum(count for *_, count in inside)
    found: list[float] = []
    below = 0.0
    wanted = [0.25 * total, 0.5 * total, 0.75 * total]
    for low, high, count in inside:
        while len(found) < 3 and below + count >= wanted[len(found)]:
            found.append(low + (high - low) * (wanted[len(found)] - below) / count)
        below += count
    return found
