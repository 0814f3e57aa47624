"""The options of problems that reasoning-gym makes, and what `gym:NAME[,NAME:weight...]` says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rloo.config.fields import OptionGroup, default_of
from rloo.config.memory_options import MemoryOptions
from rloo.config.options import TrainingOptions

# ruff: noqa: RUF009 - a subject's methods return dataclasses.field(...)

GYM = OptionGroup("Problems made by reasoning-gym")
PREFIX = "gym:"
REWARD = "gym"


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class GymOptions(MemoryOptions):
    """The options before, and those of datasets `gym:...`."""

    # fmt: off
    gym_size: int = GYM.rloo(1000, "Problems that are made to train on; others are held out.")
    gym_levels: list[int] | None = GYM.rloo(None,
        "Levels of difficulty, from 0, of each task's own curriculum; null takes the options that "
        "a task has by default.")
    gym_config: dict[str, Any] | None = GYM.rloo(None,
        "Options of tasks, {task: {option: value}}, over those of their level.")
    gym_seed: int = GYM.rloo(0, "Seed of the problems.")
    gym_curriculum: bool = GYM.rloo(False,
        "Draw prompts by the pass rates of earlier steps: most where about half pass, and harder "
        "levels only once easier ones do.")
    # fmt: on


def is_gym(name: Any) -> bool:
    """Whether `name` is a dataset of problems that reasoning-gym makes."""
    return isinstance(name, str) and name.startswith(PREFIX)


def weights_of(name: str) -> dict[str, float]:
    """The tasks of `gym:NAME[,NAME:weight...]` and their weights, 1 where none is given. Raises
    ValueError for anything else, without asking whether there are such tasks.

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


def task_options(options: GymOptions) -> dict[str, dict[str, Any]]:
    """`gym_config` by task, in which `{"task.option": value}`, as a shell gives it, is read too.
    Raises ValueError for a task without a mapping of options."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in (options.gym_config or {}).items():
        task, dot, option = key.partition(".")
        given = {option: value} if dot else value
        if not isinstance(given, dict):
            raise ValueError(
                f"gym_config has {value!r} for {task}; it must be a mapping of the task's options, "
                "as in {chain_sum: {max_terms: 3}} (gym_config)"
            )
        found.setdefault(task, {}).update(given)
    return found


def follows_from_gym(options: TrainingOptions) -> dict[str, Any]:
    """Of problems that come with their own scorers, the reward, where none is named, and of those
    that are evaluated on the split, where none is named: what is held out."""
    found: dict[str, Any] = {}
    if not options.reward and is_gym(options.dataset or options.eval_dataset):
        found["reward"] = [REWARD]
    if options.eval_split is None and is_gym(options.eval_dataset):
        found["eval_split"] = "heldout"
    return found


def check_gym(options: GymOptions) -> None:
    """Raise ValueError for options of these problems that make no sense, or where there are no such
    problems."""
    named = [name for name in (options.dataset, options.eval_dataset) if is_gym(name)]
    if not named:
        for field in GYM.fields_of(GymOptions):
            if (value := getattr(options, field.name)) != default_of(field):
                raise ValueError(
                    f"{field.name} is {value} and no dataset is gym:NAME, which it is about; name "
                    f"one (dataset), or remove it ({field.name})"
                )
    tasks = {task: None for name in named for task in weights_of(str(name))}
    if unknown := [task for task in task_options(options) if task not in tasks]:
        raise ValueError(
            f"gym_config has options of {unknown[0]}, and the tasks are {', '.join(tasks)} "
            "(gym_config, dataset)"
        )
    levels = options.gym_levels
    if levels is not None and (not levels or levels != sorted(set(levels)) or levels[0] < 0):
        raise ValueError(
            f"gym_levels is {levels}; it must be levels from 0 on, each one once and in rising "
            "order, as in [0, 1, 2], or null (gym_levels)"
        )
    if not options.gym_curriculum:
        return
    if not is_gym(options.dataset):
        raise ValueError(
            f"gym_curriculum is true and dataset is {options.dataset}; it draws among the tasks "
            "and levels of gym:NAME (gym_curriculum, dataset)"
        )
    if options.max_staleness:
        raise ValueError(
            f"gym_curriculum is true and max_staleness is {options.max_staleness}; prompts are "
            "then drawn before the pass rates of the rollouts before them are known, and a run "
            "that goes on would draw others (gym_curriculum, max_staleness)"
        )
    if not options.shuffle_dataset:
        raise ValueError(
            "gym_curriculum is true and shuffle_dataset is false; a curriculum has an order of its "
            "own (gym_curriculum, shuffle_dataset)"
        )
