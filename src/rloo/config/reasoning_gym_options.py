"""The options of reasoning-gym's problems, and the parser of `gym:NAME[,NAME:weight...]`."""

from __future__ import annotations

import math
from typing import Any

from rloo.config.options import TrainingOptions

PREFIX = "gym:"
REWARD = "gym"


def is_gym(name: Any) -> bool:
    """Whether `name` is a dataset of reasoning-gym's problems."""
    return isinstance(name, str) and name.startswith(PREFIX)


def weights_of(name: str) -> dict[str, float]:
    """The tasks of `gym:NAME[,NAME:weight...]` and their weights, by default 1. Raises ValueError
    for another syntax. Whether the tasks exist is not checked.

    >>> weights_of("gym:gcd,chain_sum:3")
    {'gcd': 1.0, 'chain_sum': 3.0}
    """
    weights: dict[str, float] = {}
    for part in name.removeprefix(PREFIX).split(","):
        task, colon, text = part.strip().partition(":")
        try:
            weight = float(text) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not task or not 0 < weight < math.inf:
            raise ValueError(
                f"dataset {name}: {part!r} is no task with a weight above 0; write "
                "gym:NAME[,NAME:weight...], as in gym:gcd,chain_sum:2 (dataset)"
            )
        if task in weights:
            raise ValueError(f"dataset {name} names {task} twice; give one weight (dataset)")
        weights[task] = weight
    return weights


def task_options(options: TrainingOptions) -> dict[str, dict[str, Any]]:
    """`dataset_kwargs.config` by task; entries `{"task.option": value}` from a shell are allowed,
    too. Raises ValueError for a task without a mapping of options."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (options.dataset_options.config or {}).items():
        task, dot, option = key.partition(".")
        given = {option: value} if dot else value
        if not isinstance(given, dict):
            raise ValueError(
                f"dataset_kwargs.config has {value!r} for {task}; it must be a mapping of the "
                "task's options, as in {chain_sum: {max_terms: 3}} (dataset_kwargs.config)"
            )
        found.setdefault(task, {}).update(given)
    return found


def follows_from_gym(options: TrainingOptions) -> dict[str, Any]:
    """Options that a `gym:` dataset sets unless they are set already: the reward `gym`, since the
    problems have scorers, and the evaluation split `heldout`."""
    found: dict[str, Any] = {}
    if not options.reward and is_gym(options.dataset or options.eval_dataset):
        found["reward"] = [REWARD]
    if options.eval_split is None and is_gym(options.eval_dataset):
        found["eval_split"] = "heldout"
    return found


def check_gym(options: TrainingOptions) -> None:
    """Raise ValueError for invalid options of reasoning-gym's problems, and for such options
    without a `gym:` dataset."""
    named = [name for name in (options.dataset, options.eval_dataset) if is_gym(name)]
    if not named:
        for name, value in (options.dataset_kwargs or {}).items():
            raise ValueError(
                f"dataset_kwargs.{name} is {value} and no dataset is gym:NAME, which it is about; "
                f"name one (dataset), or remove it (dataset_kwargs.{name})"
            )
    tasks = {task: None for name in named for task in weights_of(str(name))}
    if unknown := [task for task in task_options(options) if task not in tasks]:
        raise ValueError(
            f"dataset_kwargs.config has options of {unknown[0]}, and the tasks are "
            f"{', '.join(tasks)} (dataset_kwargs.config, dataset)"
        )
    levels = options.dataset_options.levels
    if levels is not None and (not levels or levels != sorted(set(levels)) or levels[0] < 0):
        raise ValueError(
            f"dataset_kwargs.levels is {levels}; it must be levels from 0 on, each one once and in "
            "rising order, as in [0, 1, 2], or null (dataset_kwargs.levels)"
        )
    if not options.dataset_options.curriculum:
        return
    if not is_gym(options.dataset):
        raise ValueError(
            f"dataset_kwargs.curriculum is true and dataset is {options.dataset}; it draws among "
            "the tasks and levels of gym:NAME (dataset_kwargs.curriculum, dataset)"
        )
    if options.max_staleness:
        raise ValueError(
            f"dataset_kwargs.curriculum is true and max_staleness is {options.max_staleness}; "
            "prompts are then drawn before the pass rates of the rollouts before them are known, "
            "and a run that goes on would draw others (dataset_kwargs.curriculum, max_staleness)"
        )
    if not options.shuffle_dataset:
        raise ValueError(
            "dataset_kwargs.curriculum is true and shuffle_dataset is false; a curriculum has an "
            "order of its own (dataset_kwargs.curriculum, shuffle_dataset)"
        )
