"""The options as TrainingArguments, for factories and callbacks of transformers."""

from __future__ import annotations

import logging
import os
from dataclasses import fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rloo.config.compat.aliases import READ_AS
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.trl_compatible_options import own_fields
from rloo.config.config import RLOOConfig, own_attributes
from rloo.config.fields import suggest
from rloo.config.launcher_env import is_launched, unseen

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Set after construction, since TrainingArguments would refuse bf16 without a GPU, warn of
# deprecated names, and set up DeepSpeed for Trainer's loop.
SET_AFTERWARDS = (
    "bf16", "fp16", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "resume_from_checkpoint", "deepspeed", "load_best_model_at_end",
)  # fmt: skip


def to_training_arguments(config: RLOOConfig) -> TrainingArguments:
    """The TrainingArguments for optimizer and scheduler factories and for callbacks. They include
    every option, so that loggers record it and callbacks can read `args.beta`, as with TRL. Raises
    ValueError if transformers has no optimizer or schedule with the configured name."""
    import torch

    kind = _arguments_type()
    known = {field.name for field in fields(kind)}
    values = {name: value for name, value in config.to_dict().items() if name in known}
    values["metric_for_best_model"] = config.metric_for_best_model or "reward"
    _check_names(config)
    if is_launched():  # accelerate would change the number of threads
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if is_launched() or config.parallel != "replicate":
        # At each access to its device, TrainingArguments would log that accelerate did not start
        # the processes.
        logging.getLogger("transformers.training_args").addFilter(_not_of_processes)
    with unseen():
        made = kind(**{n: v for n, v in values.items() if n not in SET_AFTERWARDS}, bf16=False)
    for name in SET_AFTERWARDS:
        setattr(made, name, values[name])
    for name in own_fields(type(config)):  # the script's callbacks read its fields
        setattr(made, name, getattr(config, name))
    for name, value in own_attributes(config).items():
        setattr(made, name, value)
    for name in READ_AS:
        if name not in known:
            setattr(made, name, getattr(config, name))
    return made


@cache
def _arguments_type() -> type[TrainingArguments]:
    from transformers import TrainingArguments

    theirs = {field.name for field in fields(TrainingArguments)}
    ours: list[Any] = [(name, Any, None) for name in option_types() if name not in theirs]
    made: Any = make_dataclass("CallbackArguments", ours, bases=(TrainingArguments,))
    return made


def _not_of_processes(record: logging.LogRecord) -> bool:
    return "parallel_mode" not in record.getMessage()


def _check_names(config: RLOOConfig) -> None:
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    for name, kind in (("optim", OptimizerNames), ("lr_scheduler_type", SchedulerType)):
        value, known = getattr(config, name), [member.value for member in kind]
        if value not in known:
            raise ValueError(
                f"{name} is {value!r}{suggest(value, known)}; transformers has {', '.join(known)}"
            )
