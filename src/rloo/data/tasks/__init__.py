"""Datasets by name: the embedded task, whose name is also the name of the embedded model, and
datasets that a program generates (`NAME:WHAT`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo.config.file_checks import load_model_config
from rloo.config.options import TrainingOptions
from rloo.data.dataset_spec import dataset_spec
from rloo.data.tasks.countdown import base_model_path, make_problems

if TYPE_CHECKING:
    from datasets import Dataset

EMBEDDED = "countdown"
NO_MODEL = f"no model is named; name a hub id, a folder, or {EMBEDDED}, the embedded model (model)"
# The configuration of the embedded task.
EMBEDDED_FILE = Path(__file__).parent / "countdown.yaml"


def load_task_rows(name: str, split: str, options: TrainingOptions | None = None) -> Dataset | None:
    """The rows of a split of a dataset: of the embedded task ("train" or "heldout"), or of a
    dataset `NAME:WHAT`, which is generated with `options` (None: the defaults). None if `name` is
    another name."""
    from datasets import Dataset  # here, so that names can be checked without this import

    if (spec := dataset_spec(name)) is not None:
        rows = spec.load(name, split, options or TrainingOptions())
        return Dataset.from_list(list(rows)) if isinstance(rows, (list, tuple)) else rows
    if name != EMBEDDED:
        return None
    if split not in ("train", "heldout"):
        raise ValueError(f"countdown has the splits train and heldout, not {split} (dataset_split)")
    return Dataset.from_list(make_problems("train" if split == "train" else "heldout"))


def resolve_model(name: str) -> str:
    """The folder of the embedded model, if `name` is its name. Other names are returned
    unchanged."""
    return str(base_model_path()) if name == EMBEDDED else name


def configuration_of(model: str, options: TrainingOptions) -> Any:
    """The transformers configuration of the model of a run. Raises ValueError if it cannot be
    loaded, or is not usable."""
    return load_model_config(
        resolve_model(model),
        revision=(options.model_init_kwargs or {}).get("revision") or "main",
        trust_remote_code=options.trust_remote_code,
    )
