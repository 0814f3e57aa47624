"""Writes the finished cells to the tables of docs/baselines.md and to pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.baselines.arms import ARMS, FAMILIES, Task
from benchmarks.baselines.comparisons import Paired
from benchmarks.baselines.figures import draw
from benchmarks.baselines.results import Results
from benchmarks.baselines.summary import (
    AXES,
    SHOWN,
    Comparison,
    Summary,
    cell_costs,
    confirm,
    summarise,
)

LEVEL = 0.05
_MEASURES = [
    "final pass@1, points",
    *(f"{axis} to the mark, ratio" for axis in AXES.values()),
]
_ESTIMATORS = {
    "rloo": "RLOO",
    "std": "mean and deviation of the group (GRPO's advantages)",
    "none": "no baseline",
}


def write_report(results: Results, tasks: Mapping[str, Task], *, docs: Path) -> None:
    """Write the tables between the marks in `docs`/baselines.md, and pictures to `docs`/baselines.
    Raises ValueError before the first write if a mark is missing."""
    found = {name: summarise(results, task) for name, task in tasks.items()}
    started = {name: one for name, one in found.items() if any(a.runs for a in one.arms.values())}
    page = docs / "baselines.md"
    text = page.read_text(encoding="utf-8")
    for name, summary in started.items():
        text = put_between(text, name, render_task(summary))
    text = put_between(text, "confirmation", render_confirmation([*found.values()]))
    text = put_between(text, "costs", render_costs(results))
    variances = results.read_figures("variance")
    text = put_measured(text, results, {name: task.title for name, task in tasks.items()})
    draw(started, variances, docs / "baselines")
    page.write_text(text, encoding="utf-8")


def put_measured(text: str, results: Results, titles: Mapping[str, str]) -> str:
    """`text` with the tables of what `variance`, `drawing` and `moments` measured, if there are
    figures."""
    for name in ("variance", "variance_middle"):
        if figures := results.read_figures(name):
            text = put_between(text, name, render_variances(figures, titles))
    if figures := results.read_figures("drawing"):
        text = put_between(text, "drawing", render_drawing(figures))
    if figures := results.read_figures("moments"):
        text = put_between(text, "moments", render_moments(figures))
    return text


def put_between(text: str, name: str, block: str) -> str:
    """`text` with `block` between <!-- baselines:name --> and <!-- /baselines:name -->. Raises
    ValueError unless each mark occurs exactly once."""
    start, end = f"<!-- baselines:{name} -->", f"<!-- /baselines:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"baselines.md needs {start} and {end}, once each")
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{start}\n{block}\n{end}", text)


def render_task(summary: Summary) -> str:
    """The tables of a task: rates, the arms, curves, and the planned comparisons."""
    task = summary.task
    parts = [
        f"{task.title}. Each run samples {summary.task.budget:,} completions. "
        f"{_tell_mark(summary)}",
        _arms_table(summary),
        "Held-out pass@1 in percent at equal numbers of completions, mean over seeds:",
        _curves_table(summary),
        "![Held-out pass@1 against completions, CPU seconds and wall seconds]"
        f"(baselines/{task.name}.png)",
    ]
    for family, comparisons in summary.comparisons.items():
        if comparisons:
            parts += [f"{FAMILIES[family]}:", _comparison_table(comparisons)]
            parts.append(_verdict(comparisons))
    parts += ["Learning rates, mean held-out pass@1 over the budget on the tuning seeds:"]
    parts.append(_tuning_table(summary))
    return "\n\n".join(parts)


def render_confirmation(summaries: Sequence[Summary]) -> str:
    """The table of the second experiment, with a row for each task and comparison."""
    rows = []
    for one, found in confirm(summaries):
        seeds = f"{len(one.confirming[found.arm].runs)}"
        titles = ARMS[found.arm].title, ARMS[found.other].title
        rows.append([f"`{one.task.name}`", *titles, seeds, *_measures(found)])
    return _table(["task", "", "against", "seeds", *_MEASURES], rows)


def _tell_mark(summary: Summary) -> str:
    if summary.mark is None or summary.best is None:
        return "No arm has all its seeds yet, so nothing is compared."
    return (
        f"The mark is a held-out pass@1 of {100 * summary.mark:.1f} %: the start plus 80 % of the "
        f"gain of the best arm with all seeds ({ARMS[summary.best].title})."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _arms_table(summary: Summary) -> str:
    """The arms with at least one run. Marks are only for arms with all seeds."""
    rows = []
    for name, arm in summary.arms.items():
        if not arm.runs:
            continue
        seeds, planned = list(arm.runs), len(summary.task.seeds_of(name))
        spread = _spread([100 * arm.last(seed) for seed in seeds])
        edge = f", {arm.edge} of the grid" if arm.edge else ""
        rate = "its default" if arm.rate is None else f"{arm.rate:g}{edge}"
        if not summary.is_complete(name):
            few = f"{len(seeds)} seeds of {planned}"
            rows.append([ARMS[name].title, few, rate, spread, *([""] * len(AXES))])
            continue
        assert summary.mark is not None
        cells = []
        for axis in AXES:
            reached = [arm.to_mark(seed, axis, summary.mark) for seed in seeds]
            known = [place for place in reached if place is not None]
            cells.append(
                f"{fmean(known):.0f}"
                if len(known) == planned
                else f"{len(known)} of {planned} runs reach it"
            )
        rows.append([ARMS[name].title, f"{planned}", rate, spread, *cells])
    head = ["", "seeds", "learning rate", "final pass@1, % (sd over seeds)"]
    return _table([*head, *(f"{axis} to the mark" for axis in AXES.values())], rows)


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.1f}" + (f" ({stdev(values):.1f})" if len(values) > 1 else "")


def _curves_table(summary: Summary) -> str:
    places = [part * summary.task.budget for part in SHOWN]
    rows = []
    for name, arm in summary.arms.items():
        if arm.runs:
            title = ARMS[name].title
            if not summary.is_complete(name):
                title += f" ({len(arm.runs)} seeds of {len(summary.task.seeds_of(name))})"
            curve = arm.mean_curve(places)
            rows.append([title, *("-" if v is None else f"{100 * v:.1f}" for v in curve)])
    return _table(["completions", *(f"{place:,.0f}" for place in places)], rows)


def _tuning_table(summary: Summary) -> str:
    rows = []
    for name, arm in summary.arms.items():
        if arm.scores:
            cells = (
                f"**{score:.3f}**" if rate == arm.rate else f"{score:.3f}"
                for rate, score in arm.scores.items()
            )
            rows.append([ARMS[name].title, *cells])
    return _table(["", *(f"{rate:g}" for rate in summary.task.rates)], rows)


def _comparison_table(comparisons: Sequence[Comparison]) -> str:
    rows = [[ARMS[c.arm].title, ARMS[c.other].title, *_measures(c)] for c in comparisons]
    return _table(["", "against", *_MEASURES], rows)


def _measures(one: Comparison) -> list[str]:
    """The cells of _MEASURES."""
    ratios = (_tell(one.ratios[axis], "{:.2f}", 1, bound=one.bound) for axis in AXES)
    return [_tell(one.last, "{:+.1f}", 100), *ratios]


def _tell(found: Paired | str, form: str, scale: float, *, bound: bool = False) -> str:
    """A figure with its interval and Holm's p, in bold if p is below LEVEL; or the reason why there
    is none."""
    if isinstance(found, str):
        return found
    mean, low, high = (form.format(scale * v) for v in (found.mean, found.low, found.high))
    text = f"{'at most ' if bound else ''}{mean} [{low}, {high}]"
    text = f"**{text}**" if found.p < LEVEL else text
    return f"{text}, p {'< 0.001' if found.p < 0.001 else f'= {found.p:.3f}'}"


def _verdict(comparisons: Sequence[Comparison]) -> str:
    """The significant differences of a family at LEVEL, after Holm's correction."""
    lines = []
    for one in comparisons:
        said = []
        if one.last.p < LEVEL:
            said.append("ends higher" if one.last.mean > 0 else "ends lower")
        for axis, name in AXES.items():
            ratio = one.ratios[axis]
            if isinstance(ratio, Paired) and ratio.p < LEVEL and (ratio.mean < 1 or not one.bound):
                said.append(f"needs {'fewer' if ratio.mean < 1 else 'more'} {name}")
        if said:
            titles = f"{ARMS[one.arm].title} against {ARMS[one.other].title}"
            lines.append(f"- {titles}: {', '.join(said)}")
    rest = len(comparisons) - len(lines)
    return "\n".join([*lines, f"- Not distinguished: {rest} of {len(comparisons)} comparisons"])


def render_costs(results: Results) -> str:
    """The mean CPU seconds of a cell with its evaluations, by task and arm."""
    costs = cell_costs(results)
    tasks = sorted({task for task, _ in costs})
    rows = []
    for arm in ARMS:
        if any((task, arm) in costs for task in tasks):
            found = (costs.get((task, arm)) for task in tasks)
            cells = ("-" if one is None else f"{one[1]:.0f} ({one[0]})" for one in found)
            rows.append([ARMS[arm].title, *cells])
    return _table(["CPU seconds of a cell (cells)", *tasks], rows)


def render_variances(variances: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The variance tables of all tasks with a measured variance."""
    parts = []
    for name, found in variances.items():
        rate = f", learning rate {found['rate']:g}" if "rate" in found else ""
        parts += [f"{titles[name]}{rate}:", _variance_table(found)]
    return "\n\n".join(parts)


def _variance_table(found: Mapping[str, Any]) -> str:
    limit = found["limit"][0]

    def share(values: Sequence[float]) -> str:
        value, low, high = (v / limit for v in values)
        return f"{value:.2f} [{low:.2f}, {high:.2f}]"

    rows = []
    for row in found["measured"]:
        estimator, size = row["estimator"], row["size"]
        predicted = "-"
        if estimator == "rloo":
            predicted = share(found["predicted"][str(size)])
        elif estimator == "none":
            predicted = share(found["no_baseline"])
        value, low, high = row["noise"]
        # This estimator has another scale, so only the last column is comparable.
        measured = "-" if estimator == "std" else share(row["variance"])
        any_size = "any" if estimator == "none" else str(size)
        noise = f"{value:.3g} [{low:.3g}, {high:.3g}]"
        rows.append([_ESTIMATORS[estimator], any_size, measured, predicted, noise])
    head = ["", "K", "K x variance / limit, measured", "predicted", "noise to signal"]
    return _table(head, rows)


def render_drawing(figures: Mapping[str, Any]) -> str:
    """The tables of `benchmarks.baselines.drawing`: second moments, and rewards by level."""
    moments, levels = [], []
    for name, found in sorted(figures.items()):
        for when in ("start", "middle"):
            one = found[when]
            cells = (one["relative"].get(q) for q in ("gradient", "deviation", "column"))
            shown = ("-" if c is None else f"{c[0]:.2f}, {c[1]:.2f}" for c in cells)
            moments.append([name, when, f"{100 * one['signal']:.1f}", *shown])
            for level, passed in one["pass_rates"].items():
                signal = one["signals"][level]
                row = [name, when, level or "all", f"{100 * passed:.0f}", f"{100 * signal:.0f}"]
                levels.append(row)
    rates = ", ".join(f"{name} {found['rate']:g}" for name, found in sorted(figures.items()))
    head = ["task", "weights", "signal, %", "best", "deviation", "column"]
    level_head = ["task", "weights", "level", "pass rate, %", "groups with a signal, %"]
    return "\n\n".join(
        [f"Learning rates: {rates}.", _table(head, moments), _table(level_head, levels)]
    )


def render_moments(figures: Mapping[str, Any]) -> str:
    """The tables of `benchmarks.baselines.moments`: second moments by baseline, and prompts."""
    moments, prompts = [], []
    for name, found in sorted(figures.items()):
        for when in ("start", "middle"):
            relative = found[when]["relative"]
            shown = (relative.get(b) for b in ("none", "regression", "column"))
            cells = ("-" if value is None else f"{value:.2f}" for value in shown)
            moments.append([name, when, *cells, f"{found[when]['correlation']:.2f}"])
        for one in found["start"]["prompts"]:
            values = [one[k] for k in ("successes", "failures", "leave_one_out", "none", "best")]
            if None not in values:
                prompts.append([name, f"{one['pass_rate']:.3f}", *(f"{v:.3g}" for v in values)])
    head = ["task", "weights", "no baseline", "regression", "regression, column", "correlation"]
    prompt_head = [
        "task", "pass rate", "successes", "failures", "leave-one-out", "no baseline",
        "best constant baseline",
    ]  # fmt: skip
    rates = ", ".join(f"{name} {found['rate']:g}" for name, found in sorted(figures.items()))
    return "\n\n".join(
        [
            f"Learning rates: {rates}.",
            _table(head, moments),
            "Those of eight prompts that have successes and failures, at the start:",
            _table(prompt_head, prompts),
        ]
    )
