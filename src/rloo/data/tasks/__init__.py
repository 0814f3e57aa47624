"""Problems that have names as datasets: the embedded task, whose name works as a model too, and
those that reasoning-gym makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo.config.options import TrainingOptions
from rloo.config.reasoning_gym_options import is_gym
from rloo.data.tasks.countdown import base_model_path, make_problems

if TYPE_CHECKING:
    from datasets import Dataset

EMBEDDED = "countdown"


def load_task_rows(name: str, split: str, options: TrainingOptions | None = None) -> Dataset | None:
    """The "train" or "heldout" rows of the embedded task, or of `gym:NAME`, as `options` (or
    the defaults) want them; None for a name of neither."""
    if is_gym(name):
        from rloo.addons.integrations.reasoning_gym.gym_dataset import load_gym_rows

        return load_gym_rows(name, split, options or TrainingOptions())
    if name != EMBEDDED:
        return None
    from datasets import Dataset  # here, so that names can be checked in no time

    if split not in ("train", "heldout"):
        raise ValueError(f"countdown has the splits train and heldout, not {split} (dataset_split)")
    return Dataset.from_list(make_problems("train" if split == "train" else "heldout"))


def resolve_model(name: str) -> str:
    """The embedded model's folder for its name; any other name unchanged."""
    return str(base_model_path()) if name == EMBEDDED else name
