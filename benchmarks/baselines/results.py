"""The result files of finished jobs, and the choice of learning rates. A file is written atomically
and has the job's options. Plain Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.baselines.arms import TUNING_SEED, Job, Task, training_job

Result = Mapping[str, Any]


def read_result(out: Path, job: Job) -> Result | None:
    """The job's result. None if there is no result, if the file has other options than the job, or
    if the file is incomplete."""
    try:
        record = json.loads((out / job.path).read_text(encoding="utf-8"))
        same = record["job"] == json.loads(json.dumps(asdict(job)))
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None
    return record["result"] if same else None


def write_result(out: Path, job: Job, result: Result) -> None:
    """Write the result atomically: the file is renamed when it is complete."""
    path = out / job.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(json.dumps({"job": asdict(job), "result": result}) + "\n", encoding="utf-8")
    part.replace(path)


def last_fifth(rewards: Sequence[float]) -> float:
    """The mean of the last fifth of a curve, which is at least one step."""
    return fmean(rewards[-max(1, len(rewards) // 5) :])


def choose_rate(curves: Mapping[float, Sequence[float]]) -> float:
    """The learning rate with the highest mean training reward in the last fifth of the steps. On a
    tie, the smaller one. `curves` has only training rewards, by learning rate."""
    return max(sorted(curves), key=lambda rate: last_fifth(curves[rate]))


def edge_of(rate: float, rates: Sequence[float]) -> str | None:
    """The edge of the grid at which `rate` is: "lowest", "highest" or None. At an edge, a better
    rate may be outside of the grid."""
    return {min(rates): "lowest", max(rates): "highest"}.get(rate)


def tuning_curves(
    out: Path, task: Task, arm: str, steps: int | None = None
) -> dict[float, list[float]]:
    """Training rewards of the arm's tuning runs, by learning rate. Raises ValueError if a run is
    missing: a smaller grid would not be the same budget."""
    found = {}
    for rate in task.rates:
        job = training_job(task, arm, rate=rate, seed=TUNING_SEED, steps=steps)
        result = read_result(out, job)
        if result is None:
            raise ValueError(
                f"{task.name} {arm}: the tuning run at learning rate {rate:g} is missing; every "
                "arm has the same grid (python -m benchmarks.baselines run)"
            )
        found[rate] = result["curves"]["reward"]
    return found
