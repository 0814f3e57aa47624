"""Summarises the finished runs of a task as plain data for tables, pictures and results.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.baselines.arms import (
    ARMS,
    REFERENCE_ARM,
    TUNING_SEED,
    Task,
    training_job,
    variance_job,
)
from benchmarks.baselines.intervals import difference_interval
from benchmarks.baselines.results import (
    Result,
    choose_rate,
    edge_of,
    last_fifth,
    read_result,
    tuning_curves,
)
from rloo.trainer.evaluate import interval

# The measures by which arms are compared, one number per run: name -> description.
MEASURES = {
    "passed": "held-out pass@1 after training",
    "reward": "held-out mean reward after training",
    "area": "mean training reward over all steps",
}


def summarise(out: Path, task: Task, *, steps: int | None = None) -> dict[str, Any]:
    """The summary of a task. `missing` has the unfinished arms with the reasons. Only
    the seeds that all finished arms have are used."""
    found: dict[str, tuple[dict[float, list[float]], float, dict[int, Result]]] = {}
    missing: dict[str, str] = {}
    for arm in ARMS:
        try:
            curves = tuning_curves(out, task, arm, steps)
        except ValueError as error:
            missing[arm] = str(error)
            continue
        rate = choose_rate(curves)
        runs = finished_runs(out, task, arm, rate=rate, steps=steps)
        if runs:
            found[arm] = curves, rate, runs
        else:
            missing[arm] = f"no run at its learning rate {rate:g} is finished"
    shared = set.intersection(*(set(runs) for _, _, runs in found.values())) if found else set()
    arms = {
        arm: summarise_arm(arm, curves, rate, [(seed, runs[seed]) for seed in sorted(shared)])
        for arm, (curves, rate, runs) in found.items()
        if shared
    }
    first = next(iter(found.values()))[2] if found else {}
    return {
        "title": task.title,
        "steps": steps or task.steps,
        "rates": list(task.rates),
        "seeds": sorted(shared),
        "arms": arms,
        "missing": missing,
        "differences": compare(arms),
        "variance": read_result(out, variance_job(task)),
        "versions": first[min(first)]["versions"] if first else None,
    }


def finished_runs(
    out: Path, task: Task, arm: str, *, rate: float, steps: int | None = None
) -> dict[int, Result]:
    """The finished runs by seed, without the tuning seed."""
    runs = {}
    for path in (out / task.name / arm).glob(f"rate{rate:g}_seed*.json"):
        seed = int(re.findall(r"seed(\d+)", path.stem)[-1])
        result = read_result(out, training_job(task, arm, rate=rate, seed=seed, steps=steps))
        if seed != TUNING_SEED and result is not None:
            runs[seed] = result
    return runs


def summarise_arm(
    arm: str,
    tuning: Mapping[float, Sequence[float]],
    rate: float,
    runs: Sequence[tuple[int, Result]],
) -> dict[str, Any]:
    """The summary of one arm at its chosen learning rate. Intervals are over prompts: in `runs` for
    one run, in `start` and `end` for the mean over runs of each prompt."""
    results = [result for _, result in runs]
    curves = list(zip(*(result["curves"]["reward"] for result in results), strict=True))
    return {
        "title": ARMS[arm].title,
        "size": ARMS[arm].size,
        "tuning": {f"{r:g}": round(last_fifth(rewards), 4) for r, rewards in tuning.items()},
        "rate": rate,
        "edge": edge_of(rate, list(tuning)),
        "runs": [summarise_run(seed, result) for seed, result in runs],
        "start": pooled(results, "start", "passed"),
        "end": pooled(results, "end", "passed"),
        "start_reward": pooled(results, "start", "reward"),
        "end_reward": pooled(results, "end", "reward"),
        "curve": {
            "mean": [round(fmean(step), 4) for step in curves],
            "low": [round(min(step), 4) for step in curves],
            "high": [round(max(step), 4) for step in curves],
        },
    }


def summarise_run(seed: int, result: Result) -> dict[str, Any]:
    curves, end = result["curves"], result["end"]
    return {
        "seed": seed,
        "start": _with_interval(result["start"]["passed"]),
        "end": _with_interval(end["passed"]),
        "greedy": round(end["greedy"], 4),
        "passed": round(fmean(end["passed"]), 5),
        "reward": round(fmean(end["reward"]), 5),
        "area": round(fmean(curves["reward"]), 5),
        "length": round(end["length"], 2),
        "kl": round(last_fifth(curves["kl"]), 3),
    }


def pooled(results: Sequence[Result], when: str, what: str) -> list[float]:
    """[mean, low, high] over prompts. The value of a prompt is the mean over runs, since all runs
    have the same prompts."""
    by_prompt = zip(*(result[when][what] for result in results), strict=True)
    return _with_interval([fmean(values) for values in by_prompt])


def compare(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[float] | None]]:
    """By measure and arm, the difference to the reference arm. The statistical unit is a run. The
    intervals of a measure hold simultaneously with 95 % confidence."""
    if REFERENCE_ARM not in arms:
        return {}
    others = [arm for arm in arms if arm != REFERENCE_ARM]

    def values(arm: str, measure: str) -> list[float]:
        return [run[measure] for run in arms[arm]["runs"]]

    return {
        measure: {
            arm: _rounded(
                difference_interval(
                    values(arm, measure),
                    values(REFERENCE_ARM, measure),
                    comparisons=len(others),
                )
            )
            for arm in others
        }
        for measure in MEASURES
    }


def _with_interval(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (fmean(values), *interval(values))]


def _rounded(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else [round(value, 4) for value in values]
