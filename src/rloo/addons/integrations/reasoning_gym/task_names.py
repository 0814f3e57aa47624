"""Checks the tasks, options and levels of `gym:NAME[,NAME:weight...]`, without torch."""

from __future__ import annotations

import sys

from rloo.addons.integrations.reasoning_gym import gym_tasks
from rloo.config.fields import suggest
from rloo.config.optional_packages import install
from rloo.config.options import TrainingOptions
from rloo.config.reasoning_gym_options import task_options, weights_of


def check_names(name: str, options: TrainingOptions) -> None:
    """Raise ValueError for unknown tasks, for options or values that a task does not accept, for
    levels above a task's last one, and if reasoning-gym is not installed."""
    try:
        known = gym_tasks.task_names()
    except ImportError as error:
        raise ValueError(
            f"dataset {name} needs reasoning-gym, which cannot be imported: {error}; "
            f"{install('gym')} (dataset)"
        ) from error
    configs = task_options(options)
    for task in weights_of(name):
        if task not in known:
            raise ValueError(
                f"dataset {name}: reasoning-gym has no task {task}{suggest(task, known)} (it has "
                f"{len(known)}, see docs/gym-tasks.md) (dataset)"
            )
        if task in gym_tasks.BY_HASH and sys.flags.hash_randomization:
            raise ValueError(
                f"dataset {name}: problems of {task} follow the order of Python's sets, which is "
                "another one in every process; set PYTHONHASHSEED=0 in the environment (dataset)"
            )
        names = gym_tasks.option_names(task)
        for option in configs.get(task, {}):
            if option not in names:
                raise ValueError(
                    f"dataset_kwargs.config: the task {task} has no option "
                    f"{option}{suggest(option, names)} (it has {', '.join(names)}) "
                    "(dataset_kwargs.config)"
                )
        levels: list[int] | list[None] = options.dataset_options.levels or [None]
        count = gym_tasks.num_levels(task)
        for level in levels:
            if level is not None and level >= count:
                has = f"levels 0 to {count - 1}" if count else "no levels"
                raise ValueError(
                    f"dataset_kwargs.levels has {level} and the task {task} has {has} "
                    "(dataset_kwargs.levels)"
                )
            gym_tasks.problems_of(task, level, configs.get(task, {}), seed=0, size=1)
