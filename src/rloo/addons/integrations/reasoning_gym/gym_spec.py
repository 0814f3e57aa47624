"""The dataset `gym:NAME[,NAME:weight...]`. `datasets` and torch are imported only when needed."""

from __future__ import annotations

from typing import Any

from rloo.addons.integrations.reasoning_gym.task_names import check_names
from rloo.data.dataset_spec import DatasetSpec


def _load(name: str, split: str, options: Any) -> Any:
    from rloo.addons.integrations.reasoning_gym.gym_dataset import load_gym_rows

    return load_gym_rows(name, split, options)


def _arrange(source: Any, options: Any) -> Any:
    from rloo.addons.integrations.reasoning_gym.curriculum import with_curriculum

    return with_curriculum(source, options)


GYM = DatasetSpec(_load, check_names, _arrange)
