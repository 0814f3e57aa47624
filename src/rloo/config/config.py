"""RLOOConfig: the options of a run as one value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from rloo.config.async_validation import correction_of
from rloo.config.compat.trl_compatible_options import (
    LENGTH as LENGTH,
)
from rloo.config.compat.trl_compatible_options import (
    AssignedOptions,
    TRLCompatibleOptions,
    cannot_change,
    known_names,
    own_fields,
)
from rloo.config.kwargs_options import KWARGS, without_defaults
from rloo.config.options import DEFAULT_BATCH, LORA, OPTIONS, TrainingOptions
from rloo.config.presets import LossForm, loss_form, preset_options
from rloo.config.reasoning_gym_options import follows_from_gym
from rloo.config.secrets import hide
from rloo.config.validation import check
from rloo.config.vllm_options import engine_of

# Shared options whose default is not TRL's: name -> (TRL's, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None, "rloo_output", "TRL resolves null to trainer_output; ours says what made it",
    ),
    "vllm_enable_sleep_mode": (
        False, None, "servers on the trainer's own GPU would keep the memory that it needs",
    ),
}  # fmt: skip


@dataclass(repr=False, eq=False)
class RLOOConfig(TRLCompatibleOptions):
    """The options of a run: the fields of `TrainingOptions` (rloo/config/options.py), checked.

    Takes every field by keyword. `TRLCompatibleOptions` lets it take and give what scripts for TRL
    do besides: aliases (`rloo.config.compat.aliases`), TRL's options that have no effect here,
    assignment, and dataclasses that inherit from it.

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change one with `dataclasses.replace`, or as scripts
    for TRL do, by assignment: what contradicts others is then refused by the trainer, which has a
    fixed copy of the options that it is given. A dataclass that inherits from it may have fields of
    its own, which are the script's, and other defaults.
    """

    def __post_init__(self) -> None:
        """Derive what follows from the options, and check them. A subclass that has its own
        `__post_init__` calls this one, as it would TRL's."""
        own = vars(self)
        own.update(engine_of(self))
        own.update(correction_of(self))
        own.update(follows_from_gym(self))
        if self.bf16 is None:
            own["bf16"] = not self.fp16
        if self.eval_strategy == "steps" and self.eval_steps is None:
            own["eval_steps"] = self.logging_steps
        if self.loss_aggregation == "constant" and self.loss_constant is None:
            own["loss_constant"] = float(self.max_completion_length)
        if self.metric_for_best_model is None and self.compares_evaluations:
            own["metric_for_best_model"] = "reward"
        if self.eval_strategy != "no":
            own["do_eval"] = True  # as scripts read it from TrainingArguments
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            own["greater_is_better"] = not self.metric_for_best_model.endswith("loss")
        own["train_sampling_strategy"] = "random" if self.shuffle_dataset else "sequential"
        own["offload"] = sorted(set(self.offload))
        usual = preset_options(self.preset)
        for option in KWARGS:
            given = getattr(self, option) or {}
            own[option] = without_defaults(option, given, usual.get(option) or {})
        check(self)
        own["_checked"] = self._values()

    def with_asked(self) -> RLOOConfig | None:
        """A fixed copy with the length that was assigned since a trainer has these options, or
        since this was asked for; None where nothing was. Raises ValueError as `require_unchanged`.
        """
        changed = self.require_unchanged()
        if "_taken" in vars(self):
            vars(self)["_taken"].asked.clear()
        return self.with_values(**changed) if changed else None

    def require_unchanged(self) -> dict[str, Any]:
        """Raise ValueError where an option of what the trainer was given is not what the trainer
        has any more, but for the length, which is returned."""
        taken = vars(self).get("_taken") or AssignedOptions()
        changed = {n: v for n, v in taken.asked.items() if n in LENGTH or v != getattr(self, n)}
        for name in changed.keys() - set(LENGTH):
            raise ValueError(cannot_change(name))
        return changed

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Inside, what the trainer was given cannot be changed, either."""
        taken = vars(self).setdefault("_taken", AssignedOptions())
        taken.training = True
        try:
            yield
        finally:
            taken.training = False

    def fixed(self) -> RLOOConfig:
        """An equal copy, read and checked again if anything changed since that was done. It cannot
        be changed by assignment, but for the length of the next training, and says so where this
        object is changed and its trainer then trains."""
        taken = AssignedOptions()
        values = self._values()
        if values != self._checked:
            values = RLOOConfig(**values)._values()
        copy = self.with_values(**values)
        for each in (copy,) if self._fixed else (copy, self):
            vars(each)["_taken"] = taken
        return copy

    def with_values(self, **values: Any) -> RLOOConfig:
        """A fixed copy in which some options have other `values`. These are neither read nor
        checked: a run chose them itself (threads, the model's name), or they turn something off."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | self._values() | values, _fixed=True)
        vars(copy)["_checked"] = copy._values()
        return copy

    @property
    def named(self) -> frozenset[str]:
        """The options that were given, in a file, on a command line or by a script; the others have
        their defaults, or what follows from these."""
        return self._named

    @property
    def loss_form(self) -> LossForm:
        """What the preset does to the loss and no option says."""
        return loss_form(self.preset)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        own = own_fields(type(self))
        alike = all(getattr(self, name) == getattr(other, name) for name in own)
        return alike and self._values() == other._values()

    def __repr__(self) -> str:
        shown = [option.name for option in OPTIONS if option.repr] + [*own_fields(type(self))]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{type(self).__qualname__}({values})"

    def _values(self) -> dict[str, Any]:
        values = {option.name: getattr(self, option.name) for option in OPTIONS}
        return {n: v if type(v) in _UNCHANGING else deepcopy(v) for n, v in values.items()}

    def to_dict(self) -> dict[str, Any]:
        """The resolved options as JSON types; `RLOOConfig(**config.to_dict()) == config`, but for
        secrets, since this is what is written down: `hub_token` is null, and what a shell has put
        into other options is the name of its variable."""
        values = self._values() | {"hub_token": None}
        plain = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        return dict(hide(plain))

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with text for what is no text, number or switch, as TensorBoard takes it."""
        sizes = {
            "train_batch_size": self.per_device_train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        values, plain = self.to_dict() | sizes, (bool, int, float, str)
        return {n: v if type(v) in plain else str(v) for n, v in values.items()}


_UNCHANGING = {bool, int, float, str, type(None)}  # most values, which deepcopy is slow to return

# Before, parsers needed a class of its own.
RLOOArguments = RLOOConfig


def own_attributes(config: RLOOConfig) -> dict[str, Any]:
    """What a script has put on `config` besides options, by name."""
    mine = {*known_names(), *own_fields(type(config))}
    return {n: value for n, value in vars(config).items() if n[0] != "_" and n not in mine}


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every option about adapters at its default: none is added."""
    return config.with_values(
        **{field.name: field.default for field in LORA.fields_of(TrainingOptions)}
    )


def in_one_process(config: RLOOConfig) -> RLOOConfig:
    """`config` with the batches of all its `num_processes` in one process, which also samples."""
    size, batch = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if config.num_prompts is None or (size, batch) != DEFAULT_BATCH:
        size *= config.num_processes or 1
    return config.with_values(
        num_processes=None,
        per_device_train_batch_size=size,
        max_staleness=0,
        sampler_processes=None,
        async_kwargs=None,
    )


def resolve_interval(steps: float, total_steps: int) -> int:
    """Optimizer steps between two events: `steps`, or that share of `total_steps` when below 1."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
