"""Summarises the finished cells of a task as plain data for tables and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from benchmarks.baselines.arms import ARMS, FAMILIES, Task
from benchmarks.baselines.cells import final_cells
from benchmarks.baselines.comparisons import (
    MARK,
    Paired,
    compare_paired,
    compare_ratios,
    correct_holm,
    find_crossing,
    value_at,
)
from benchmarks.baselines.results import Result, Results, choose_rate, edge_of, tuning_scores

# The parts of the budget of the table of curves.
SHOWN = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
# The costs of a run, by the names of the points.
AXES = {"completions": "completions", "cpu": "CPU seconds", "wall": "wall seconds"}


@dataclass
class ArmSummary:
    """`runs` are the finished reported runs by seed, `scores` the criterion of the tuning by
    learning rate. `missing` is the reason why there are no runs, or empty."""

    scores: Mapping[float, float] = field(default_factory=dict)
    rate: float | None = None
    edge: str | None = None
    runs: Mapping[int, Result] = field(default_factory=dict)
    missing: str = ""

    def curve(self, seed: int, axis: str) -> tuple[list[float], list[float]]:
        """The places on `axis`, a key of AXES, and held-out pass@1 there."""
        points = self.runs[seed]["points"]
        return [point[axis] for point in points], [point["pass@1"] for point in points]

    def last(self, seed: int) -> float:
        """Held-out pass@1 at the end of the budget."""
        return float(self.runs[seed]["points"][-1]["pass@1"])

    def to_mark(self, seed: int, axis: str, mark: float) -> float | None:
        """Completions or seconds of a run to the mark; None if it does not reach the mark."""
        return find_crossing(*self.curve(seed, axis), mark)

    def mean_curve(self, places: Sequence[float]) -> list[float | None]:
        """The mean over runs at numbers of completions. None where a run has no value."""
        found = []
        for place in places:
            values = [value_at(*self.curve(seed, "completions"), place) for seed in self.runs]
            known = [value for value in values if value is not None]
            found.append(fmean(known) if known and len(known) == len(values) else None)
        return found

    @property
    def cell_cpu(self) -> float:
        """Mean CPU seconds of a cell."""
        return fmean(float(run["cell_cpu"]) for run in self.runs.values())


@dataclass(frozen=True)
class Comparison:
    """A planned comparison of an arm with another. `last` is the difference of final pass@1;
    `ratios` are, by axis, those of the places at which the mark is reached, or the reason why there
    is none. `bound` is whether a run of the other arm did not reach the mark: its budget stands for
    it, so the true ratio is smaller. p values are Holm's, over the family."""

    arm: str
    other: str
    last: Paired
    ratios: Mapping[str, Paired | str]
    bound: bool


@dataclass
class Summary:
    """The summary of a task. `start`, `best` and `mark` are None while no arm has all seeds.
    `confirming` are the arms with all runs of the second experiment."""

    task: Task
    arms: dict[str, ArmSummary]
    start: float | None = None
    best: str | None = None
    mark: float | None = None
    comparisons: dict[str, list[Comparison]] = field(default_factory=dict)
    confirming: dict[str, ArmSummary] = field(default_factory=dict)

    def is_complete(self, arm: str) -> bool:
        """Whether the arm has all planned seeds."""
        return list(self.arms[arm].runs) == list(self.task.seeds_of(arm))


def summarise(results: Results, task: Task) -> Summary:
    """The summary of a task from its finished cells, with the task's own budget and seeds."""
    found = Summary(
        task, {arm: _summarise_arm(results, task, arm) for arm in filter(task.takes, ARMS)}
    )
    for name, arm in found.arms.items():
        if arm.runs and (seeds := task.confirming_seeds(name)):
            runs = _read_runs(results, task, name, arm.rate, seeds)
            if len(runs) == len(seeds):
                found.confirming[name] = replace(arm, runs=runs)
    whole = {name: arm for name, arm in found.arms.items() if found.is_complete(name)}
    methods = {name: arm for name, arm in whole.items() if ARMS[name].sets_mark}
    if not methods:
        return found
    ends = {name: fmean(map(arm.last, arm.runs)) for name, arm in methods.items()}
    found.best = max(ends, key=lambda name: ends[name])
    # All arms start with the same weights and the same noise.
    first = methods[found.best]
    found.start = fmean(float(run["points"][0]["pass@1"]) for run in first.runs.values())
    found.mark = found.start + MARK * (ends[found.best] - found.start)
    for family in FAMILIES:
        pairs = [
            (name, other)
            for name in whole
            if ARMS[name].family == family
            for other in ARMS[name].against
            if other in whole
        ]
        found.comparisons[family] = _compare(found, pairs)
    return found


def confirm(summaries: Sequence[Summary]) -> list[tuple[Summary, Comparison]]:
    """The comparisons of the second experiment, each with its task's summary. The mark and the
    learning rates are those of the first. Holm's correction is over all of them."""
    found = [
        (one, _compare_pair(one.confirming, one.mark, arm, other))
        for one in summaries
        for arm in one.task.confirmed
        for other in ARMS[arm].against
        if one.mark is not None and {arm, other} <= one.confirming.keys()
    ]
    corrected = _correct([comparison for _, comparison in found])
    return [(one, c) for (one, _), c in zip(found, corrected, strict=True)]


def _summarise_arm(results: Results, task: Task, arm: str) -> ArmSummary:
    try:
        scores = tuning_scores(results, task, arm)
    except ValueError as error:
        return ArmSummary(missing=str(error))
    rate = choose_rate(scores)
    runs = _read_runs(results, task, arm, rate, task.seeds_of(arm))
    return ArmSummary(scores, rate, edge_of(rate, task.rates), runs)


def _read_runs(
    results: Results, task: Task, arm: str, rate: float | None, seeds: Sequence[int]
) -> dict[int, Result]:
    """The finished reported runs of an arm at a learning rate, by seed."""
    cells = final_cells(task, arm, rate, seeds)
    return {cell.seed: run for cell in cells if (run := results.read(cell)) is not None}


def _compare(summary: Summary, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    assert summary.mark is not None
    arms, mark = summary.arms, summary.mark
    return _correct([_compare_pair(arms, mark, arm, other) for arm, other in pairs])


def _correct(found: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons of a family with Holm's p values."""
    lasts = _corrected([c.last for c in found])
    ratios = {axis: _corrected([c.ratios[axis] for c in found]) for axis in AXES}
    return [
        replace(c, last=lasts[n], ratios={axis: ratios[axis][n] for axis in AXES})
        for n, c in enumerate(found)
    ]


def _corrected(family: Sequence[Any]) -> list[Any]:
    """One measure of a family with Holm's p values. Reasons are returned unchanged."""
    tested = {n: one.p for n, one in enumerate(family) if isinstance(one, Paired)}
    values = correct_holm(tested)
    return [replace(one, p=values[n]) if n in values else one for n, one in enumerate(family)]


def _compare_pair(arms: Mapping[str, ArmSummary], mark: float, arm: str, other: str) -> Comparison:
    ours, theirs = arms[arm], arms[other]
    seeds = [seed for seed in ours.runs if seed in theirs.runs]
    ratios: dict[str, Paired | str] = {}
    bound = False
    for axis in AXES:
        reached = [ours.to_mark(seed, axis, mark) for seed in seeds]
        ends = [theirs.curve(seed, axis)[0][-1] for seed in seeds]
        marks = [theirs.to_mark(seed, axis, mark) for seed in seeds]
        bound = any(place is None for place in marks)
        count = sum(place is not None for place in reached)
        if count < len(seeds):
            ratios[axis] = f"{count} of {len(seeds)} runs reach the mark"
        elif axis != "completions" and not _same_processor(ours, theirs):
            ratios[axis] = "other processors"
        else:
            known = [
                end if place is None else place for place, end in zip(marks, ends, strict=True)
            ]
            ratios[axis] = compare_ratios([float(place or 0.0) for place in reached], known)
    last = compare_paired(*([arm.last(seed) for seed in seeds] for arm in (ours, theirs)))
    return Comparison(arm, other, last, ratios, bound)


def _same_processor(ours: ArmSummary, theirs: ArmSummary) -> bool:
    both = [seed for seed in ours.runs if seed in theirs.runs]
    return all(ours.runs[s]["processor"] == theirs.runs[s]["processor"] for s in both)


def cell_costs(results: Results) -> dict[tuple[str, str], tuple[int, float]]:
    """(number of finished cells, mean CPU seconds), by task and arm."""
    found: dict[tuple[str, str], list[float]] = {}
    for cell, result in results.all_results():
        found.setdefault((cell["task"], cell["arm"]), []).append(float(result["cell_cpu"]))
    return {key: (len(values), fmean(values)) for key, values in found.items()}
