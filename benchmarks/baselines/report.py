"""Writes the finished runs to tables in docs/baselines.md, pictures, and results.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.arms import ARMS, REFERENCE_ARM, Task
from benchmarks.baselines.figures import draw
from benchmarks.baselines.summary import MEASURES, summarise

_ESTIMATORS = {
    "rloo": "RLOO",
    "std": "mean and deviation of the group (GRPO's advantages)",
    "none": "no baseline",
}


def write_report(
    out: Path, tasks: Mapping[str, Task], *, docs: Path, steps: int | None = None
) -> None:
    """Write the tables between the marks in `docs`/baselines.md, and pictures and data to
    `docs`/baselines. Raises ValueError before the first write if a mark is missing."""
    results = {"tasks": {name: summarise(out, task, steps=steps) for name, task in tasks.items()}}
    page = docs / "baselines.md"
    text = page.read_text(encoding="utf-8")
    for name, task in results["tasks"].items():
        text = put_between(text, name, render_task(task))
    text = put_between(text, "variance", render_variances(results["tasks"]))
    draw(results, docs / "baselines")
    data = json.dumps(results, indent=None, separators=(",", ":"))
    (docs / "baselines" / "results.json").write_text(data + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def put_between(text: str, name: str, block: str) -> str:
    """`text` with `block` between <!-- baselines:name --> and <!-- /baselines:name -->. Raises
    ValueError unless each mark occurs exactly once."""
    start, end = f"<!-- baselines:{name} -->", f"<!-- /baselines:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1:
        raise ValueError(f"baselines.md needs {start} and {end}, once each")
    pattern = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
    return pattern.sub(lambda _: f"{start}\n{block}\n{end}", text)


def render_task(task: Mapping[str, Any]) -> str:
    """Tables of the tuning, held-out figures in total and by seed, and the conclusions."""
    parts = []
    if task["arms"]:
        seeds = ", ".join(map(str, task["seeds"]))
        parts = [
            f"{task['steps']} steps; seeds {seeds}. Learning rate: mean training reward of the "
            "last fifth of the steps, one tuning seed; the highest is taken.",
            _tuning_table(task),
            "Held-out pass@1 in percent [95 % over prompts, of the mean over seeds]; KL in nats "
            "per completion, and tokens per completion, at the end.",
            _heldout_table(task),
            "Each seed by itself, after training, in percent [95 % over prompts]:",
            _seed_table(task),
            f"Difference to {ARMS[REFERENCE_ARM].title} [95 % over runs, for the column as a "
            "whole], in percentage points:",
            _difference_table(task),
            _verdict(task),
        ]
        versions = ", ".join(f"{name} {value}" for name, value in task["versions"].items())
        parts.append(f"Versions: {versions}.")
    parts += [f"- {ARMS[arm].title}: not measured ({why})" for arm, why in task["missing"].items()]
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _tuning_table(task: Mapping[str, Any]) -> str:
    rates = [f"{rate:g}" for rate in task["rates"]]
    rows = []
    for arm in task["arms"].values():
        chosen = f"{arm['rate']:g}"
        cells = [
            f"**{arm['tuning'][rate]:.3f}**" if rate == chosen else f"{arm['tuning'][rate]:.3f}"
            for rate in rates
        ]
        edge = f", {arm['edge']} of the grid" if arm["edge"] else ""
        rows.append([arm["title"], str(arm["size"]), *cells, f"{chosen}{edge}"])
    return _table(["", "K", *rates, "chosen"], rows)


def _heldout_table(task: Mapping[str, Any]) -> str:
    graded = _is_graded(task)
    head = ["", "before", "after", *(["mean reward after"] if graded else [])]
    head += ["mean training reward, all steps", "KL", "tokens"]
    rows = []
    for arm in task["arms"].values():
        runs = arm["runs"]

        def mean(name: str, runs: Sequence[Mapping[str, float]] = runs) -> float:
            return sum(run[name] for run in runs) / len(runs)

        spread = [run["area"] for run in runs]
        rows.append(
            [
                arm["title"],
                _percent(arm["start"]),
                _percent(arm["end"]),
                *([_percent(arm["end_reward"])] if graded else []),
                f"{mean('area'):.3f} ({min(spread):.3f}..{max(spread):.3f})",
                f"{mean('kl'):.1f}",
                f"{mean('length'):.1f}",
            ]
        )
    return _table(head, rows)


def _seed_table(task: Mapping[str, Any]) -> str:
    rows = [
        [arm["title"], *(_percent(run["end"]) for run in arm["runs"])]
        for arm in task["arms"].values()
    ]
    return _table(["", *(f"seed {seed}" for seed in task["seeds"])], rows)


def _difference_table(task: Mapping[str, Any]) -> str:
    measures = _measures(task)
    rows = [
        [ARMS[arm].title, *(_points(task["differences"][m][arm]) for m in measures)]
        for arm in task["arms"]
        if arm != REFERENCE_ARM and task["differences"]
    ]
    return _table(["", *(MEASURES[measure] for measure in measures)], rows)


def _verdict(task: Mapping[str, Any]) -> str:
    """A sentence for each measure that names the differences whose intervals exclude 0."""
    lines = []
    for measure in _measures(task):
        differences = task["differences"].get(measure, {})
        known = {arm: d for arm, d in differences.items() if d is not None}
        higher = [ARMS[arm].title for arm, (_, low, _) in known.items() if low > 0]
        lower = [ARMS[arm].title for arm, (_, _, high) in known.items() if high < 0]
        rest = len(known) - len(higher) - len(lower)
        found = [f"higher: {'; '.join(higher)}"] if higher else []
        found += [f"lower: {'; '.join(lower)}"] if lower else []
        found += [f"not told apart from it by these runs: {rest} of {len(known)} arms"]
        lines.append(
            f"- {MEASURES[measure]}, against {ARMS[REFERENCE_ARM].title}: " + ". ".join(found)
        )
    return "\n".join(lines)


def _measures(task: Mapping[str, Any]) -> list[str]:
    return [m for m in MEASURES if m != "reward" or _is_graded(task)]


def _is_graded(task: Mapping[str, Any]) -> bool:
    """Whether the mean reward differs from pass@1."""
    return any(arm["end"] != arm["end_reward"] for arm in task["arms"].values())


def _percent(values: Sequence[float]) -> str:
    value, low, high = (100 * v for v in values)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _points(values: Sequence[float] | None) -> str:
    if values is None:
        return "-"
    value, low, high = (100 * v for v in values)
    text = f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def render_variances(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """The variance tables of all tasks with a measured variance."""
    parts = []
    for name, task in tasks.items():
        if task["variance"] is None:
            parts.append(f"- {name}: not measured")
        else:
            parts += [f"{task['title']}:", _variance_table(task["variance"])]
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
