"""The variance of a rollout's gradient with each baseline, relative to leave-one-out.

    PYTHONPATH=src python -m benchmarks.baselines.rollout_variance [--task countdown]
        [--prompts 16] [--completions 512] [--sizes 2,4,8] [--out runs/baselines]

The policy is the task's base model, and the prompts are fixed. Each has the same number of sampled
completions, and every estimator gets the same rollouts: one group of K for each prompt. `variance`
is the trace of the covariance of the gradient, divided by that of leave-one-out. The 95 % interval
is a paired bootstrap over rollouts. `scale` is the component of the mean gradient along that of
leave-one-out: 1 without bias, except for the noise of both. A biased estimator may have a small
variance because its scale is small: `noise` is the variance divided by the squared scale.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.arms import Task
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import make_trainer
from benchmarks.baselines.variance import (
    OPTIONS,
    Gradients,
    draw,
    interval,
    resamples,
    trace_variance,
)

_TOKEN = {"importance_sampling_level": "token", "estimator": "optimal_token"}
_LEFT_IN = {"estimator_kwargs": {"leave1out": False}}
# The first is what the others are compared with.
ESTIMATORS: dict[str, dict[str, Any]] = {
    "leave-one-out": {},
    "shrinkage": {"estimator": "shrinkage"},
    "length_weighted": {"estimator": "length_weighted"},
    "optimal_token": _TOKEN,
    "opo": {"estimator": "length_weighted", **_LEFT_IN},
    "optimal_token_baseline": {**_TOKEN, **_LEFT_IN},
}


def measure(task: Task, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each size and estimator."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = {"max_completion_length": task.max_tokens, "num_generations": 2}
        trainer = make_trainer(
            task,
            OPTIONS | sampled,
            model=task.model(options.out),
            folder=Path(folder) / "run",
        )
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        prompts = rollouts.prompts.next(options.prompts)
        samples = [draw(trainer, rollouts, prompt, options.completions) for prompt in prompts]
        gradients = Gradients(trainer, options.coordinates)
        rows = []
        for size in options.sizes:
            found = {
                name: gradients.of_rollouts(samples, size, estimator)
                for name, estimator in ESTIMATORS.items()
            }
            rows += compare(found, size)
    return rows


def compare(found: dict[str, Tensor], size: int) -> list[dict[str, Any]]:
    """The rows of one size, from gradients (rollouts, coordinates) of each estimator. The first
    estimator is what the others are compared with."""
    usual, *_ = found.values()
    counts = resamples(len(usual), torch.Generator().manual_seed(size))
    base, mean = trace_variance(usual, counts), usual.mean(0)
    return [
        {
            "K": size,
            "estimator": name,
            "rollouts": len(vectors),
            "variance": interval(trace_variance(vectors, counts) / base),
            "scale": round((vectors.mean(0) @ mean / (mean @ mean)).item(), 3),
        }
        for name, vectors in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines.rollout_variance")
    parser.add_argument("--task", choices=TASKS, default="countdown")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=512, help="of each prompt")
    parser.add_argument("--coordinates", type=int, default=4096, help="random parameters")
    parser.add_argument(
        "--sizes", type=lambda text: [int(x) for x in text.split(",")], default=[2, 4, 8]
    )
    parser.add_argument("--out", type=Path, default=Path("runs/baselines"))
    options = parser.parse_args(arguments)
    print("| K | estimator | rollouts | variance / leave-one-out | 95 % interval | scale | noise |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in measure(TASKS[options.task], options):
        value, low, high = row["variance"]
        print(
            f"| {row['K']} | {row['estimator']} | {row['rollouts']} | {value:.3f} | "
            f"{low:.3f} to {high:.3f} | {row['scale']:.3f} | {value / row['scale'] ** 2:.3f} |"
        )


if __name__ == "__main__":
    main()
