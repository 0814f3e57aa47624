"""Draws the pictures of docs/baselines.md from the data of results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines.arms import REFERENCE_ARM

SMOOTHED_STEPS = 5
_GREY = "#6b6b6b"
# One hue, which is darker for larger K.
_BY_SIZE = {
    "rloo_k2": "#9ecae1",
    "rloo_k4": "#5ba3cf",
    "rloo_k8": "#2171b5",
    "rloo_k16": "#08306b",
}
_OTHERS = {
    "rloo_kl_loss": "#009e73",
    "grpo": "#d55e00",
    "dr_grpo": "#e69f00",
    "reinforce_pp": "#cc79a7",
    "reinforce_pp_baseline": "#7b4ea3",
    "reinforce_running": "#5d4a2f",
}


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the pictures: curves of each task, held-out figures, and variances. Returns the
    files."""
    import matplotlib

    matplotlib.use("Agg")
    style: Any = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
        "savefig.dpi": 130,
        "figure.constrained_layout.use": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tasks = results["tasks"]
    with matplotlib.rc_context(style):
        files = [
            _curves(task, folder / f"curves_{name}.png")
            for name, task in tasks.items()
            if task["arms"]
        ]
        trained = {name: task for name, task in tasks.items() if task["arms"]}
        files += [_heldout(trained, folder / "heldout.png")] if trained else []
        measured = {name: task for name, task in tasks.items() if task["variance"]}
        files += [_variances(measured, folder / "variance.png")] if measured else []
    return files


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average: the mean of each value and the values before it, SMOOTHED_STEPS in total if
    available."""
    parts = [values[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


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


def _curves(task: Mapping[str, Any], path: Path) -> Path:
    """Training reward by step: RLOO for each K, and the other estimators together with RLOO for K =
    8."""
    figure, axes = _panels(2, 9.5, 3.8, sharey=True)
    for axis, colours in zip(axes, (_BY_SIZE, {REFERENCE_ARM: _GREY, **_OTHERS}), strict=True):
        for name, colour in colours.items():
            if name not in task["arms"]:
                continue
            arm = task["arms"][name]
            curve = {key: smooth(values) for key, values in arm["curve"].items()}
            steps = range(1, len(curve["mean"]) + 1)
            axis.fill_between(steps, curve["low"], curve["high"], color=colour, alpha=0.12, lw=0)
            axis.plot(steps, curve["mean"], color=colour, lw=1.6, label=arm["title"])
        axis.set_xlabel("step (64 completions each)")
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel(f"training reward, mean of {SMOOTHED_STEPS} steps")
    figure.suptitle(f"{task['title']}: mean and range of {len(task['seeds'])} seeds", fontsize=10)
    return _save(figure, path)


def _heldout(tasks: Mapping[str, Any], path: Path) -> Path:
    """Held-out pass@1 after training: a dot for each run, and the mean with its interval over
    prompts."""
    figure, axes = _panels(len(tasks), 9.5, 3.6)
    for axis, task in zip(axes, tasks.values(), strict=True):
        arms = list(task["arms"].values())
        for place, (name, arm) in enumerate(task["arms"].items()):
            colour = (_BY_SIZE | _OTHERS)[name]
            mean, low, high = (100 * value for value in arm["end"])
            axis.plot([low, high], [place, place], color=colour, lw=2.5, alpha=0.6)
            axis.plot(mean, place, "|", color=colour, markersize=12, markeredgewidth=2)
            dots = [100 * run["passed"] for run in arm["runs"]]
            axis.plot(dots, [place] * len(dots), "o", color=colour, markersize=4, alpha=0.8)
        axis.set_yticks(range(len(arms)), [arm["title"] for arm in arms])
        axis.invert_yaxis()
        axis.set_xlabel("held-out pass@1 after training, %")
        axis.set_title(task["title"].split(" (")[0], fontsize=9)
    return _save(figure, path)


def _variances(tasks: Mapping[str, Any], path: Path) -> Path:
    """K times the variance divided by its limit for large K: measured dots and the predicted
    line."""
    figure, axes = _panels(len(tasks), 9.5, 3.6)
    for axis, task in zip(axes, tasks.values(), strict=True):
        found = task["variance"]
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
        axis.set_title(task["title"], fontsize=9)
    axes[0].set_ylabel("gradient variance / its limit")
    axes[-1].legend(fontsize=8)
    return _save(figure, path)
