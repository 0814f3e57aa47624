"""Tasks that ship with the package; their names work as dataset and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo.data.tasks.countdown import base_model_path, make_problems

if TYPE_CHECKING:
    from datasets import Dataset

EMBEDDED = "countdown"


def load_task_rows(name: str, split: str) -> Dataset | None:
    """The "train" or "heldout" rows of the embedded task; None if `name` is not that task."""
    if name != EMBEDDED:
        return None
    from datasets import Dataset  # here, so that names can be checked in no time

    if split not in ("train", "heldout"):
        raise ValueError(f"countdown has the splits train and heldout, not {split} (dataset_split)")
    return Dataset.from_list(make_problems("train" if split == "train" else "heldout"))


def resolve_model(name: str) -> str:
    """The embedded model's folder for its name; any other name unchanged."""
    return str(base_model_path()) if name == EMBEDDED else name
