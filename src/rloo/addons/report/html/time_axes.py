"""The horizontal axes of the charts, and histograms over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

from rloo.addons.report.html.downsampling import known, rounded
from rloo.tracking.histograms import Bin, add_into, histogram, quartiles
from rloo.tracking.run_reader import RunFolder

# The number of points of an axis; values between two points are interpolated.
POINTS = 500
# The number of times and of bins of a histogram over time.
TIMES, BINS = 200, 24


def time_axes(run: RunFolder) -> dict[str, list[float | None]]:
    """The steps at which the axes are known, and their values at the end of each: `completions`,
    `tokens` and `seconds` (wall time of the run). A run that did not record one of them lacks
    it."""
    series = {name: dict(values) for name, values in known(run.metrics).items()}
    steps = sorted({row["step"] for row in run.metrics})
    if not steps:
        return {"step": []}
    counts = {row["step"]: row.get("completions", 0) for row in run.histograms}
    times, tokens = series.get("wall_time", {}), series.get("num_tokens", {})
    found: dict[str, list[float]] = {"step": [float(step) for step in steps]}
    if counts:
        found["completions"] = list(accumulate(float(counts.get(step, 0)) for step in steps))
    if tokens:
        found["tokens"] = list(accumulate((tokens.get(step, 0.0) for step in steps), max))
    if times:
        found["seconds"] = list(accumulate((times.get(step, 0.0) for step in steps), max))
    places = sorted({round(n * (len(steps) - 1) / (POINTS - 1)) for n in range(POINTS)})
    return {name: [_rounded(values[place]) for place in places] for name, values in found.items()}


def histograms_over_time(run: RunFolder) -> dict[str, Any]:
    """By name (`reward`, `length`, ...) the `edges` of equal bins, and for at most 200 times the
    first and the last step (`from`, `to`), the numbers of values in the bins (`counts`) and the
    `quartiles`. They are of all completions, or of the recorded ones for a run without
    histograms.jsonl."""
    rows = [(row["step"], row.get("histograms", {})) for row in run.histograms]
    rows = rows or list(_of_recorded(run))
    names = dict.fromkeys(name for _, row in rows for name, bins in row.items() if bins)
    return {
        name: _over_time([(s, row[name]) for s, row in rows if row.get(name)]) for name in names
    }


def _of_recorded(run: RunFolder) -> Iterator[tuple[int, dict[str, list[Bin]]]]:
    keys = {"reward": "reward", "length": "num_tokens", "advantage": "advantage"}
    for step, rows in groupby(run.completions, key=lambda row: row["step"]):
        some = list(rows)
        values = {
            name: [row[key] for row in some if isinstance(row.get(key), (int, float))]
            for name, key in keys.items()
        }
        yield step, {name: histogram(of_name) for name, of_name in values.items()}


def _over_time(rows: Sequence[tuple[int, Sequence[Bin]]]) -> dict[str, Any]:
    low = min(bins[0][0] for _, bins in rows)
    high = max(each[1] for _, bins in rows for each in bins)
    least = max(1e-9 * max(abs(low), abs(high)), 1e-300)  # less has no 24 bins in floats
    if high - low <= least:
        low, high = low - max(0.5, least), high + max(0.5, least)
    edges = [low + (high - low) * n / BINS for n in range(BINS + 1)]
    size = -(-len(rows) // TIMES)
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    merged = [[each for _, bins in part for each in bins] for part in parts]
    summed = [add_into(edges, bins) for bins in merged]
    return {
        "edges": [rounded(edge) for edge in edges],
        "from": [part[0][0] for part in parts],
        "to": [part[-1][0] for part in parts],
        "quartiles": [[rounded(value) for value in quartiles(bins)] for bins in merged],
        "counts": [[rounded(count) for count in counts] for counts in summed],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
