"""Rows of the dataset `gym:NAME[,NAME:weight...]`, which are equal in every process and run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from datasets import Dataset, Features, Value

from rloo.addons.integrations.reasoning_gym.gym_tasks import Problem, problems
from rloo.addons.integrations.reasoning_gym.task_names import check_names
from rloo.config.options import TrainingOptions
from rloo.config.reasoning_gym_options import task_options, weights_of

# One in this number of problems is held out. The choice depends only on the problem's text.
_ONE_IN = 5
# Most held-out problems of all tasks and levels together. With 512 problems, a measured rate is
# within 4.4 percentage points.
MOST_HELD_OUT = 512
_FEATURES = Features(
    {name: Value("string") for name in ("prompt", "answer", "task", "entry")}
    | {"level": Value("int64")}
)


class TaskLevel(NamedTuple):
    """A task and its level. The level is None for the task's default options."""

    task: str
    level: int | None


def load_gym_rows(name: str, split: str, options: TrainingOptions) -> Dataset:
    """The "train" or "heldout" rows of `gym:NAME[,NAME:weight...]`.

    Columns: `prompt` (the question), `answer` (the library's answer, or None), `task`, `level`
    (None without levels), and `entry`, which the reward `gym` needs. A row is a function of (seed,
    split, task, level, number). The number of rows of a task is proportional to its weight; a
    task's rows are spread evenly over its levels. Tasks and levels alternate, so that the first
    rows have these proportions too. No problem is in both splits. Raises ValueError for another
    split, for arguments that `check_names` refuses, and if there are too few rows or distinct
    problems.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"{name} has the splits train and heldout, not {split} (dataset_split)")
    check_names(name, options)
    weights, configs = weights_of(name), task_options(options)
    rows: list[tuple[float, int, dict[str, Any]]] = []
    counts = _counts(weights, options, split)
    for number, (cell, count) in enumerate(counts.items()):
        chosen = _chosen(cell, split, options, configs.get(cell.task, {}), count)
        for index, problem in enumerate(islice(chosen, count)):
            row = {
                "prompt": problem.question,
                "answer": problem.answer,
                "task": cell.task,
                "level": cell.level,
                "entry": problem.entry,
            }
            rows.append(((index + 0.5) / count, number, row))
    rows.sort(key=lambda row: row[:2])
    return Dataset.from_list([row for *_, row in rows], features=_FEATURES)


def _counts(
    weights: Mapping[str, float], options: TrainingOptions, split: str
) -> dict[TaskLevel, int]:
    """The number of rows of each task and level. The remaining rows after rounding down go to the
    cells with the largest remainders."""
    total = options.dataset_options.size
    if split == "heldout":
        total = min(total, MOST_HELD_OUT)
    levels: list[int] | list[None] = options.dataset_options.levels or [None]
    shares = {
        TaskLevel(task, level): total * weight / (sum(weights.values()) * len(levels))
        for task, weight in weights.items()
        for level in levels
    }
    counts = {cell: int(share) for cell, share in shares.items()}
    by_loss = sorted(shares, key=lambda cell: counts[cell] - shares[cell])
    for cell in by_loss[: total - sum(counts.values())]:
        counts[cell] += 1
    if none := [cell for cell, count in counts.items() if not count]:
        task, level = none[0]
        at = "" if level is None else f" at level {level}"
        raise ValueError(
            f"dataset_kwargs.size is {options.dataset_options.size}, of which {task}{at} would "
            f"have no problem in the split {split}; each task needs at least 1 at each level "
            "(dataset_kwargs.size, weights)"
        )
    return counts


def _chosen(
    cell: TaskLevel, split: str, options: TrainingOptions, config: Mapping[str, Any], count: int
) -> Iterator[Problem]:
    """The first `count` problems of a cell in the split."""
    key = f"{options.dataset_options.seed} {split} {cell.task} {cell.level}"
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    # With enough distinct problems, this number of problems almost surely has `count` of the split.
    tried = 5 * _ONE_IN * count + 100
    found = 0
    for problem in problems(cell.task, cell.level, config, seed=seed, size=tried):
        if _is_held_out(problem) == (split == "heldout"):
            found += 1
            yield problem
        if found == count:
            return
    at = "" if cell.level is None else f" at level {cell.level}"
    raise ValueError(
        f"of {tried} problems of {cell.task}{at} only {found} are for the split {split}, and "
        f"{count} are needed: it has too few different ones (dataset_kwargs.size, "
        "dataset_kwargs.levels, dataset_kwargs.config)"
    )


def _is_held_out(problem: Problem) -> bool:
    return hashlib.sha256(problem.question.encode()).digest()[0] % _ONE_IN == 0
