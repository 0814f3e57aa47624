"""Curves with at most 1,000 points. A point for several steps has their mean, minimum and maximum,
so that no peak is lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rloo.tracking.metric_registry import find

POINTS = 1000
# Steps at either end whose mean is compared with the healthy band.
WINDOW = 8

Values = Sequence[tuple[int, float]]


def known(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """The finite values of every metric as (step, value), in order of appearance."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                found.setdefault(name, []).append((row["step"], float(value)))
    return found


def curve(values: Values) -> dict[str, Any]:
    """The curve as a dict of lists: `from` and `to` (the first and the last step of each point) and
    `mean`; also `low` and `high` if a point stands for several steps."""
    size = max(1, math.ceil(len(values) / POINTS))
    parts = [values[begin : begin + size] for begin in range(0, len(values), size)]
    steps = [[part[side][0] for part in parts] for side in (0, -1)]
    shown: dict[str, Any] = {"from": steps[0], "to": steps[1]}
    shown["mean"] = [rounded(fmean(v for _, v in part)) for part in parts]
    if size > 1:
        shown["low"] = [rounded(min(v for _, v in part)) for part in parts]
        shown["high"] = [rounded(max(v for _, v in part)) for part in parts]
    return shown


def rounded(value: float) -> float | None:
    """The value to four digits, or None if it is not finite (JSON has no such number)."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def ends(values: Values) -> tuple[float, float]:
    """The means of the first and of the last steps: at most 8 steps each, and at most a third of
    all."""
    size = min(WINDOW, max(1, len(values) // 3))
    return fmean(v for _, v in values[:size]), fmean(v for _, v in values[-size:])


def bounds_of(name: str, values: Values) -> tuple[float, float] | None:
    """The bounds of a metric's healthy range in this run; None if it has no range."""
    row = find(name)
    if row is None or row.band is None:
        return None
    return row.band.bounds(ends(values)[0])


def outside(series: Mapping[str, Values]) -> list[dict[str, Any]]:
    """The metrics outside their healthy range at the end of the run (at any time, if only 0 is
    healthy). Each entry has the value, the range, and the number of steps outside the range."""
    found = []
    for name, values in series.items():
        row, bounds = find(name), bounds_of(name, values)
        if row is None or row.band is None or bounds is None:
            continue
        start, end = ends(values)
        times = sum(not bounds[0] <= v <= bounds[1] for _, v in values)
        never = row.band.low is None and row.band.high == 0
        if times and (never or not row.band.holds(end, start)):
            value = rounded(max(v for _, v in values) if never else end)
            said = {"name": name, "value": value, "band": str(row.band)}
            found.append(said | {"steps": times, "of": len(values)})
    return found
