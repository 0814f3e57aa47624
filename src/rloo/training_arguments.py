"""RLOOConfig as transformers' TrainingArguments, for its factories and callbacks only."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rloo.config import RLOOConfig

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Ours to decide: TrainingArguments would refuse bf16 where it finds no GPU.
OURS = (
    "bf16",
    "fp16",
    "use_cpu",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "resume_from_checkpoint",
)


def to_training_arguments(config: RLOOConfig) -> TrainingArguments:
    """The arguments that optimizer and scheduler factories and logging callbacks ask for.

    Precision, device and resuming are not in it. Raises ValueError when transformers knows no
    optimizer or schedule of that name.
    """
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    values: dict[str, Any] = {
        name: value
        for name, value in config.to_dict().items()
        if name in known and name not in OURS
    }
    values["metric_for_best_model"] = config.metric_for_best_model or "reward"
    return TrainingArguments(**values, bf16=False, fp16=False, use_cpu=True)
