"""RLOOConfig: the options of a run as one value."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
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

# Options of TRL with another default here: name -> (TRL's default, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None, "rloo_output", "TRL resolves null to trainer_output; ours says what made it",
    ),
    "vllm_gpu_memory_utilization": (
        0.3, None, "a server on separate GPUs would use a third of their memory",
    ),
    "vllm_enable_sleep_mode": (
        False, None, "servers on the trainer's own GPU would keep the memory that it needs",
    ),
}  # fmt: skip


@dataclass(repr=False, eq=False)
class RLOOConfig(TRLCompatibleOptions):
    """The checked options of a run: the fields of `TrainingOptions` (rloo/config/options.py).

    Every field is a keyword argument. `TRLCompatibleOptions` adds the features that scripts for TRL
    use: aliases (`rloo.config.compat.aliases`), TRL's options that have no effect here, assignment,
    and subclasses that are dataclasses.

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options that
    contradict each other, and another value than the default for an option of TRL or transformers
    that this version does not implement. An option can be changed with `dataclasses.replace`, or by
    assignment, as in scripts for TRL. The trainer then checks for contradictions, and makes a fixed
    copy of the options. A subclass that is a dataclass may add fields for its script, and change
    defaults.
    """

    def __post_init__(self) -> None:
        """Derive dependent options, and check all options. If a subclass has a `__post_init__`, it
        must call this method, as with TRL's class."""
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
        """A fixed copy in which the options of the run length (`LENGTH`) have the values that a
        script assigned since the trainer copied these options, or since the last call of this
        method. None if no such option was assigned. Raises the errors of `require_unchanged`."""
        changed = self.require_unchanged()
        if "_taken" in vars(self):
            vars(self)["_taken"].asked.clear()
        return self.with_values(**changed) if changed else None

    def require_unchanged(self) -> dict[str, Any]:
        """Raise ValueError if an option was changed after the trainer copied the options. Changes
        of the run length are allowed, and returned."""
        taken = vars(self).get("_taken") or AssignedOptions()
        changed = {n: v for n, v in taken.asked.items() if n in LENGTH or v != getattr(self, n)}
        for name in changed.keys() - set(LENGTH):
            raise ValueError(cannot_change(name))
        return changed

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """In this block, the script's options, which the trainer has copied, cannot be changed."""
        taken = vars(self).setdefault("_taken", AssignedOptions())
        taken.training = True
        try:
            yield
        finally:
            taken.training = False

    def fixed(self) -> RLOOConfig:
        """An equal copy, checked again if an option changed since the last check. Assignment to the
        copy can only change the length of the next training. If this object changes later,
        `require_unchanged` of the copy raises an error before the next training."""
        taken = AssignedOptions()
        values = self._values()
        if values != self._checked:
            values = RLOOConfig(**values)._values()
        copy = self.with_values(**values)
        for each in (copy,) if self._fixed else (copy, self):
            vars(each)["_taken"] = taken
        return copy

    def with_values(self, **values: Any) -> RLOOConfig:
        """A fixed copy in which some options have other `values`. The values are neither parsed nor
        checked. They must be valid: values that the run chose (threads, the model's name), or
        values that turn a feature off."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | self._values() | values, _fixed=True)
        vars(copy)["_checked"] = copy._values()
        return copy

    @property
    def named(self) -> frozenset[str]:
        """The names of the options that were set in a file, on a command line or by a script. All
        other options have defaults or derived values, or those of the embedded task."""
        return self._named

    def without_named(self, names: Collection[str]) -> RLOOConfig:
        """This object. Its options `names` do not count as `named` from now on."""
        vars(self)["_named"] = self._named.difference(names)
        return self

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
        for secrets, since this dict is written to files and loggers. `hub_token` is null, and a
        secret from an environment variable is replaced by the variable's name."""
        values = self._values() | {"hub_token": None}
        plain = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        return dict(hide(plain))

    def to_json_string(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` for TensorBoard: values other than strings, numbers and bools are converted to
        strings."""
        sizes = {
            "train_batch_size": self.per_device_train_batch_size,
            "eval_batch_size": self.eval_batch_size,
        }
        values, plain = self.to_dict() | sizes, (bool, int, float, str)
        return {n: v if type(v) in plain else str(v) for n, v in values.items()}


_UNCHANGING = {bool, int, float, str, type(None)}  # not copied: deepcopy is slow even for these

# Earlier versions had a separate class for parsers.
RLOOArguments = RLOOConfig


def own_attributes(config: RLOOConfig) -> dict[str, Any]:
    """The attributes that a script has set on `config`, except options, by name."""
    mine = {*known_names(), *own_fields(type(config))}
    return {n: value for n, value in vars(config).items() if n[0] != "_" and n not in mine}


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every LoRA option at its default, so that no adapter is added."""
    return config.with_values(
        **{field.name: field.default for field in LORA.fields_of(TrainingOptions)}
    )


def in_one_process(config: RLOOConfig) -> RLOOConfig:
    """`config` for one process that trains and samples, with the total batch of all processes."""
    size, batch = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if config.num_prompts is None or (size, batch) != DEFAULT_BATCH:
        size *= config.num_processes or 1
    return config.with_values(
        num_processes=None,
        parallel_kwargs={
            **(config.parallel_kwargs or {}),
            "dp_shard_size": None,
            "sp_size": 1,
            "tp_size": 1,
        },
        per_device_train_batch_size=size,
        max_staleness=0,
        sampler_processes=None,
        async_kwargs=None,
    )


def resolve_interval(steps: float, total_steps: int) -> int:
    """The number of optimizer steps between two events. If `steps` is below 1, it is a share of
    `total_steps`."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
