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

    Takes every field by keyword. `TRLCompatibleOptions` adds the features that scripts for TRL use:
    aliases (`rloo.config.compat.aliases`), TRL's options that have no effect here, assignment, and
    dataclasses that inherit from it.

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change an option with `dataclasses.replace`, or by
    assignment, as scripts for TRL do. The trainer then checks for contradictions, and takes a fixed
    copy of the options. A dataclass that inherits from it may add fields for the script, and change
    defaults.
    """

    def __post_init__(self) -> None:
        """Derive dependent options, and check all. A subclass with a `__post_init__` must call this
        one, as with TRL's."""
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
            own["do_eval"] = True  # scripts read it, as in TrainingArguments
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
        """A fixed copy with the run length (`LENGTH`) assigned since the trainer took these options
        or since the last call; None if nothing was. Raises as `require_unchanged` does."""
        changed = self.require_unchanged()
        if "_taken" in vars(self):
            vars(self)["_taken"].asked.clear()
        return self.with_values(**changed) if changed else None

    def require_unchanged(self) -> dict[str, Any]:
        """Raise ValueError if an option has changed since the trainer took its copy. Changes of the
        run length are allowed, and returned."""
        taken = vars(self).get("_taken") or AssignedOptions()
        changed = {n: v for n, v in taken.asked.items() if n in LENGTH or v != getattr(self, n)}
        for name in changed.keys() - set(LENGTH):
            raise ValueError(cannot_change(name))
        return changed

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """A block in which the script's object, which the trainer has copied, is fixed too."""
        taken = vars(self).setdefault("_taken", AssignedOptions())
        taken.training = True
        try:
            yield
        finally:
            taken.training = False

    def fixed(self) -> RLOOConfig:
        """An equal copy, checked again if anything changed since the last check. Assignment cannot
        change it, except for the length of the next training. If this object changes, the copy's
        `require_unchanged` raises an error before the next training."""
        taken = AssignedOptions()
        values = self._values()
        if values != self._checked:
            values = RLOOConfig(**values)._values()
        copy = self.with_values(**values)
        for each in (copy,) if self._fixed else (copy, self):
            vars(each)["_taken"] = taken
        return copy

    def with_values(self, **values: Any) -> RLOOConfig:
        """A fixed copy in which some options have other `values`. These are not parsed or checked:
        the run chose them (threads, the model's name), or they turn something off."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | self._values() | values, _fixed=True)
        vars(copy)["_checked"] = copy._values()
        return copy

    @property
    def named(self) -> frozenset[str]:
        """The names of the options that were set in a file, on a command line or by a script. All
        others have defaults or derived values."""
        return self._named

    @property
    def loss_form(self) -> LossForm:
        """The properties of the loss that only the preset sets."""
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
        """The resolved options as JSON types: `RLOOConfig(**config.to_dict()) == config`, except
        for secrets, since files and loggers get this dict. `hub_token` is null, and a secret from
        an environment variable is replaced by the variable's name."""
        values = self._values() | {"hub_token": None}
        plain = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        return dict(hide(plain))

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with every value that is no string, number or bool as a string, for
        TensorBoard."""
        sizes = {
            "train_batch_size": self.per_device_train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        values, plain = self.to_dict() | sizes, (bool, int, float, str)
        return {n: v if type(v) in plain else str(v) for n, v in values.items()}


_UNCHANGING = {bool, int, float, str, type(None)}  # most values; deepcopy is slow even for these

# Earlier versions had a separate class for parsers.
RLOOArguments = RLOOConfig


def own_attributes(config: RLOOConfig) -> dict[str, Any]:
    """The attributes that a script has set on `config` and that are no options, by name."""
    mine = {*known_names(), *own_fields(type(config))}
    return {n: value for n, value in vars(config).items() if n[0] != "_" and n not in mine}


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every LoRA option at its default, so that no adapter is added."""
    return config.with_values(
        **{field.name: field.default for field in LORA.fields_of(TrainingOptions)}
    )


def in_one_process(config: RLOOConfig) -> RLOOConfig:
    """`config` for one process with the total batch of its `num_processes`; it samples as well."""
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
