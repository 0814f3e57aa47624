"""The options in others' forms: TRL's as a plain dataclass, for scripts that parse them with
transformers' HfArgumentParser or TRL's TrlParser; and as transformers' TrainingArguments, for its
factories and callbacks."""

from __future__ import annotations

import logging
import os
import typing
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rloo.config.config import PLACE, RLOOConfig, known_names, option_types
from rloo.config.launchers import is_launched, unseen
from rloo.config.reading import coerce, declare, default_of, suggest
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Of the options that are refused or idle here, those that TRL's RLOOConfig does not have: they are
# ModelConfig's and ScriptArguments', which scripts parse beside it, and other systems'.
ELSEWHERE = {
    "dtype", "model_revision", "attn_implementation", "lora_task_type", "bnb_4bit_quant_storage",
    "dataset_streaming", "advantage_estimator", "token_level_kl", "loss_type", "clip_ratio_against",
}  # fmt: skip
# option that is refused or idle here -> (its default, help)
_OTHERS: dict[str, tuple[Any, str]] = {
    **{n: (values[0], f"Refused: {why}.") for n, (values, why) in REFUSED.items() if values},
    **{n: (default, f"No effect: {why}.") for n, (default, why) in WITHOUT_EFFECT.items()},
}
_DEFAULTS: dict[str, Any] = {
    **{name: default for name, (default, _) in _OTHERS.items()},
    **{option.name: default_of(option) for option in fields(RLOOConfig)},
}


def _parseable(hint: Any) -> Any:
    """`hint`, or the nearest that an argument parser takes; RLOOConfig reads the text."""
    kinds = typing.get_args(hint)
    containers = [typing.get_origin(kind) for kind in kinds]
    if tuple in containers:
        return list[float] | None
    # Of three kinds the parser takes the second: these are parsed as text.
    if dict in containers:
        return dict[str, Any] | str | None
    if list in containers and str in kinds:
        return list[str] | str | None
    return str | None if bool in kinds and str in kinds else hint


def _options() -> Iterator[tuple[str, Any, Any]]:
    hints = option_types()
    for option in fields(RLOOConfig):
        if "TRL" in option.metadata["systems"]:
            help = {"help": option.metadata["help"]}
            field = declare(default_of(option), help, shown=option.repr)
            yield option.name, _parseable(hints[option.name]), field
    for name, (default, meaning) in _OTHERS.items():
        if "." not in name and name not in ELSEWHERE:
            kind = list[str] if isinstance(default, list) else type(default)
            hint = str | None if default is None else kind
            yield name, hint, declare(default, {"help": meaning})


_Fields: Any = make_dataclass(
    "_Fields", _options(), namespace=dict(PLACE), kw_only=True, slots=True
)


@dataclass(slots=True)
class RLOOArguments(_Fields):
    """Every option of TRL's RLOOConfig with the default that it has here, by keyword.

    HfArgumentParser and TrlParser take it beside ModelConfig and ScriptArguments, and RLOOTrainer
    as `args`. A subclass may add options of RLOOConfig (`preset`) and change defaults. Raises
    ValueError for a value of another type; everything else is checked by `to_config`.
    """

    def __post_init__(self) -> None:
        # A parser leaves mappings and switches of several types as text; scripts read values.
        hints = option_types()
        for option in fields(self):
            if option.name in hints:
                value = coerce(option.name, hints[option.name], getattr(self, option.name))
                setattr(self, option.name, value)

    def to_config(self) -> RLOOConfig:
        """The options that are not at RLOOConfig's default, as a RLOOConfig. Raises its errors.
        Fields that a subclass adds and that are no option are the script's own and left out."""
        known = known_names()
        values = {o.name: getattr(self, o.name) for o in fields(self) if o.name in known}
        changed = {n: v for n, v in values.items() if n not in _DEFAULTS or v != _DEFAULTS[n]}
        return RLOOConfig(**deepcopy(changed))


# -- transformers' own ---------------------------------------------------------------------------

# TrainingArguments would refuse bf16 where it finds no GPU, warn of names that change, and set
# DeepSpeed up for its own loop.
SET_AFTERWARDS = (
    "bf16", "fp16", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "resume_from_checkpoint", "deepspeed",
)  # fmt: skip


def to_training_arguments(config: RLOOConfig) -> TrainingArguments:
    """The arguments that optimizer and scheduler factories and callbacks are given. Every option of
    ours is among them, so that a logger records it and a callback reads `args.beta`, as with TRL.
    Raises ValueError when transformers knows no optimizer or schedule of that name."""
    import torch

    kind = _arguments_type()
    known = {field.name for field in fields(kind)}
    values = {name: value for name, value in config.to_dict().items() if name in known}
    values["metric_for_best_model"] = config.metric_for_best_model or "reward"
    _check_names(config)
    if is_launched():  # accelerate would change the number of threads
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if is_launched() or config.parallel != "replicate":
        # At every look at its device it would say that the processes are not accelerate's.
        logging.getLogger("transformers.training_args").addFilter(_not_of_processes)
    with unseen():
        made = kind(**{n: v for n, v in values.items() if n not in SET_AFTERWARDS}, bf16=False)
    for name in SET_AFTERWARDS:
        setattr(made, name, values[name])
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
