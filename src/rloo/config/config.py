"""RLOOConfig: the options of a run as one value."""

from __future__ import annotations

import math
import typing
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rloo.config import deepspeed
from rloo.config.accelerate import launched_options
from rloo.config.aliases import ALIASES, CONVERSIONS, resolve
from rloo.config.beside import correction_of
from rloo.config.checks import check
from rloo.config.generation_kwargs import sampling_options
from rloo.config.options import DEFAULT_BATCH, LORA
from rloo.config.presets import LossForm, loss_form, over_preset
from rloo.config.reading import default_of, suggest
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.vllm_options import VLLMOptions, engine_of
from rloo.dist import process_count, process_rank, rank_here

# Shared options whose default is not TRL's: name -> (TRL's, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None, "rloo_output", "TRL resolves null to trainer_output; ours says what made it",
    ),
    "vllm_enable_sleep_mode": (
        False, None, "servers on the trainer's own GPU would keep the memory that it needs",
    ),
}  # fmt: skip
# What TrainingArguments says of where it runs.
PLACE = {
    "world_size": process_count(), "process_index": process_rank(),
    "local_process_index": rank_here(), "should_save": process_rank() == 0,
    "should_log": process_rank() == 0,
}  # fmt: skip


@dataclass(init=False)
class RLOOConfig(VLLMOptions):
    """The options of a run. Takes every field by keyword, and every alias (`rloo.config.aliases`).

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change one with `dataclasses.replace`, or as scripts
    for TRL do, by assignment: what contradicts others is then refused by the trainer, which fixes
    the options that it is given.
    """

    _fixed = False
    _checked = None
    _idle = MappingProxyType[str, Any]({})  # what was given for options without effect

    def __init__(self, output_dir: str | None = None, **options: Any) -> None:
        if output_dir is not None:
            options["output_dir"] = output_dir
        values = over_preset(resolve(options, option_types()))
        values |= sampling_options(values.get("generation_kwargs"))
        values |= launched_options(values)
        values |= deepspeed.options_of(values)
        own = vars(self)  # past __setattr__, which reads every value
        own["_idle"] = _idle_of(options)
        own.update({field.name: default_of(field) for field in fields(self)} | values)
        own.update(engine_of(self))
        own.update(correction_of(self))
        if self.bf16 is None:
            own["bf16"] = not self.fp16
        if self.eval_strategy == "steps" and self.eval_steps is None:
            own["eval_steps"] = self.logging_steps
        if self.loss_aggregation == "constant" and self.loss_constant is None:
            own["loss_constant"] = float(self.max_completion_length)
        if self.metric_for_best_model is None and self.compares_evaluations:
            own["metric_for_best_model"] = "reward"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            own["greater_is_better"] = not self.metric_for_best_model.endswith("loss")
        check(self)
        own["_checked"] = self._values()

    if not TYPE_CHECKING:  # a type checker shall still find misspelt options

        def __setattr__(self, name: str, value: Any) -> None:
            if self._fixed:
                raise ValueError(
                    f"{name} cannot be changed: these options belong to a trainer; give another "
                    f"trainer a copy, dataclasses.replace(args, {name}=...)"
                )
            if name == "preset":
                raise ValueError(
                    "preset cannot be assigned; give it when the options are made, "
                    "RLOOConfig(preset=...), because it sets the defaults of others"
                )
            for ours, read in resolve({name: value}, option_types()).items():
                vars(self)[ours] = read
            vars(self)["_idle"] = {**self._idle, **_idle_of({name: value})}

        def __getattr__(self, name: str) -> Any:
            # Scripts written for TRL read options that are refused here (`if args.deepspeed:`), by
            # the names that they have there, and what Trainer derives (`if args.should_save:`).
            if name in REFUSED and REFUSED[name][0]:
                return REFUSED[name][0][0]
            if name in WITHOUT_EFFECT:
                return self._idle.get(name, WITHOUT_EFFECT[name][0])
            if name in PLACE:
                return PLACE[name]
            if name in ALIASES and name not in CONVERSIONS:
                return getattr(self, ALIASES[name][0])
            raise AttributeError(f"RLOOConfig has no option {name}{suggest(name, option_types())}")

    def fixed(self) -> RLOOConfig:
        """An equal copy, read and checked again if anything changed since that was done. Neither
        can be changed by assignment from now on."""
        copy = self if self._values() == self._checked else replace(self)
        vars(self)["_fixed"] = True
        vars(copy)["_idle"] = self._idle
        return copy.with_values()

    def with_values(self, **values: Any) -> RLOOConfig:
        """A fixed copy in which some options have other `values`. These are neither read nor
        checked: a run chose them itself (threads, the model's name), or they turn something off."""
        copy = object.__new__(type(self))
        vars(copy).update(self._values() | values, _fixed=True, _idle=self._idle)
        vars(copy)["_checked"] = copy._values()
        return copy

    @property
    def loss_form(self) -> LossForm:
        """What the preset does to the loss and no option says."""
        return loss_form(self.preset)

    def _values(self) -> dict[str, Any]:
        return deepcopy({field.name: getattr(self, field.name) for field in fields(self)})

    def to_dict(self) -> dict[str, Any]:
        """The resolved options as JSON types; `RLOOConfig(**config.to_dict()) == config`, but for
        `hub_token`, which is null here: what is written down holds no secret."""
        values = self._values() | {"hub_token": None}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}


def _idle_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options without effect among `options`, as they were given."""
    return {name: value for name, value in options.items() if name in WITHOUT_EFFECT}


@cache
def option_types() -> dict[str, Any]:
    """Our option names and their annotations, in the order of declaration."""
    return typing.get_type_hints(RLOOConfig)


@cache
def known_names() -> tuple[str, ...]:
    """Every name that an option may be given by, also those that are refused or idle."""
    return (*option_types(), *ALIASES, *REFUSED, *WITHOUT_EFFECT)


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every option about adapters at its default: none is added."""
    return config.with_values(**{field.name: field.default for field in LORA.fields_of(config)})


def in_one_process(config: RLOOConfig) -> RLOOConfig:
    """`config` with the batches of all its `num_processes` in one process, which also samples."""
    size, batch = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if config.num_prompts is None or (size, batch) != DEFAULT_BATCH:
        size *= config.num_processes or 1
    return config.with_values(
        num_processes=None,
        per_device_train_batch_size=size,
        max_staleness=0,
        sampler_process=None,
        reward_workers=None,
        partial_rollouts=False,
    )


def resolve_interval(steps: float, total_steps: int) -> int:
    """Optimizer steps between two events: `steps`, or that share of `total_steps` when below 1."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
