"""Draws the pictures of docs/baselines.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.baselines.arms import ARMS, FAMILIES
from benchmarks.baselines.cells import FRACTIONS
from benchmarks.baselines.summary import AXES, Summary

REFERENCE_ARM = "rloo"
_GREY = "#6b6b6b"


def draw(
    summaries: Mapping[str, Summary], variances: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Write the pictures: curves of each task and family, and variances. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "savefig.dpi": 110,
        "figure.constrained_layout.use": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(style):
        files = [_curves(summary, folder / f"{name}.png") for name, summary in summaries.items()]
        files += [_variances(variances, folder / "variance.png")] if variances else []
    return files


def _panels(count: int, width: float, height: float, **options: Any) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(width, height), squeeze=False, **options)
    return figure, list(axes[0])


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    # Removed: the version of the library would change the file.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
    return path


def _curves(summary: Summary, path: Path) -> Path:
    """Held-out pass@1 against completions, CPU seconds and wall seconds: a row for each family with
    runs. The band is the range of the seeds."""
    import matplotlib.pyplot as plt

    shown = {
        family: [
            name
            for name, arm in summary.arms.items()
            if arm.runs and (ARMS[name].family == family or name == REFERENCE_ARM)
        ]
        for family in FAMILIES
    }
    rows = {family: names for family, names in shown.items() if set(names) - {REFERENCE_ARM}}
    rows = rows or {"methods": shown["methods"]}
    figure, axes = plt.subplots(len(rows), 3, figsize=(13, 3.2 * len(rows)), squeeze=False)
    for panels, (family, names) in zip(axes, rows.items(), strict=True):
        for name in names:
            _draw_arm(summary, name, panels)
        panels[0].set_title(FAMILIES[family], fontsize=9)
        panels[0].set_ylabel("held-out pass@1")
        panels[1].legend(fontsize=7, loc="lower right")
        for panel, label in zip(panels, AXES.values(), strict=True):
            panel.set_xlabel(label)
            if summary.mark is not None:
                panel.axhline(summary.mark, color=_GREY, lw=0.8, ls=":")
    figure.suptitle(f"{summary.task.title}: mean and range of the seeds", fontsize=10)
    return _save(figure, path)


def _draw_arm(summary: Summary, name: str, panels: Sequence[Any]) -> None:
    arm = summary.arms[name]
    colour = _GREY if name == REFERENCE_ARM else None
    label = ARMS[name].title
    if not summary.is_complete(name):
        label += f" ({len(arm.runs)} seeds of {len(summary.task.seeds_of(name))})"
    places = [0.0, *(part * summary.task.budget for part in FRACTIONS)]
    known = [(x, y) for x, y in zip(places, arm.mean_curve(places), strict=True) if y is not None]
    (line,) = panels[0].plot(*zip(*known, strict=True), color=colour, lw=1.6, label=label)
    curves = [arm.curve(seed, "completions")[1] for seed in arm.runs]
    if len({len(values) for values in curves}) == 1 and len(curves[0]) == len(places):
        points = list(zip(*curves, strict=True))
        low, high = [min(p) for p in points], [max(p) for p in points]
        panels[0].fill_between(places, low, high, color=line.get_color(), alpha=0.12, lw=0)
        means = [fmean(p) for p in points]
        for panel, axis in zip(panels[1:], ("cpu", "wall"), strict=True):
            seconds = zip(*(arm.curve(seed, axis)[0] for seed in arm.runs), strict=True)
            x = [fmean(s) for s in seconds]
            panel.plot(x, means, color=line.get_color(), lw=1.6, label=label)


def _variances(variances: Mapping[str, Any], path: Path) -> Path:
    """K times the variance divided by its limit for large K: measured dots and the predicted
    line."""
    figure, axes = _panels(len(variances), 9.5, 3.6)
    for axis, (name, found) in zip(axes, variances.items(), strict=True):
        limit = found["limit"][0]
        sizes = [int(size) for size in found["predicted"]]
        axis.set_xscale("log", base=2)
        line = [list(values) for values in zip(*found["predicted"].values(), strict=True)]
        middle, low, high = ([value / limit for value in values] for values in line)
        axis.fill_between(sizes, low, high, color=_GREY, alpha=0.15, lw=0)
        axis.plot(sizes, middle, color=_GREY, lw=1.4, label="predicted (other completions)")
        for estimator, colour, label in (
            ("rloo", "#2171b5", "RLOO, measured"),
            ("none", "#d55e00", "no baseline, measured"),
        ):
            rows = [row for row in found["measured"] if row["estimator"] == estimator]
            values = [[value / limit for value in row["variance"]] for row in rows]
            axis.errorbar(
                [row["size"] for row in rows],
                [value[0] for value in values],
                yerr=[[v[0] - v[1] for v in values], [v[2] - v[0] for v in values]],
                fmt="o",
                color=colour,
                capsize=3,
                label=label,
            )
        axis.axhline(1.0, color=_GREY, lw=0.8, ls=":", label="true mean as baseline (K large)")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("K, at equal completions")
        axis.set_title(name, fontsize=9)
    axes[0].set_ylabel("gradient variance / its limit")
    axes[-1].legend(fontsize=8)
    return _save(figure, path)
