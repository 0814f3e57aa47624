"""Tasks that ship with the package: known by name where a dataset or a model is asked for."""

from __future__ import annotations

from datasets import Dataset

from rloo.data.tasks.countdown import base_model_path, make_problems

EMBEDDED = "countdown"


def load_task_rows(name: str, split: str) -> Dataset | None:
    """The rows of the embedded task, for its splits "train" and "heldout"; None for other names."""
    if name != EMBEDDED:
        return None
    if split not in ("train", "heldout"):
        raise ValueError(f"countdown has the splits train and heldout, not {split} (dataset_split)")
    return Dataset.from_list(make_problems("train" if split == "train" else "heldout"))


def resolve_model(name: str) -> str:
    """The folder of the embedded model for its name; other names as they are."""
    return str(base_model_path()) if name == EMBEDDED else name
