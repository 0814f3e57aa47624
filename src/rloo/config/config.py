"""RLOOConfig: the options of a run as one value, and the batch arithmetic that follows from it.

Knows nothing of tensors: importing it needs neither torch nor transformers.
"""

from __future__ import annotations

import math
import typing
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rloo.config.aliases import ALIASES, CONVERSIONS, resolve
from rloo.config.checks import ADAPTER_OPTIONS, check
from rloo.config.generation_kwargs import sampling_options
from rloo.config.options import DEFAULT_BATCH, Options
from rloo.config.presets import LossForm, loss_form, over_preset
from rloo.config.reading import suggest
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT

# Shared options whose default is not TRL's: name -> (TRL's, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None,
        "rloo_output",
        "TRL resolves null to trainer_output; ours says what made it",
    ),
}
# What TrainingArguments says of where it runs, here always the same.
ONE_PROCESS = {
    "world_size": 1,
    "process_index": 0,
    "local_process_index": 0,
    "should_save": True,
    "should_log": True,
}


@dataclass(init=False)
class RLOOConfig(Options):
    """The options of a run. Takes every field by keyword, and every alias (`rloo.config.aliases`).

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change one with `dataclasses.replace`, or as scripts
    for TRL do, by assignment: what contradicts others is then refused by the trainer, which fixes
    the options that it is given.
    """

    _fixed = False

    def __init__(self, output_dir: str | None = None, **options: Any) -> None:
        if output_dir is not None:
            options["output_dir"] = output_dir
        values = resolve(options, option_types())
        values = over_preset(values)
        values |= sampling_options(values.get("generation_kwargs"))
        for field in fields(self):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            object.__setattr__(self, field.name, values.get(field.name, default))
        if self.bf16 is None:
            object.__setattr__(self, "bf16", not self.fp16)
        if self.eval_strategy == "steps" and self.eval_steps is None:
            object.__setattr__(self, "eval_steps", self.logging_steps)
        if self.loss_aggregation == "constant" and self.loss_constant is None:
            object.__setattr__(self, "loss_constant", float(self.max_completion_length))
        if self.metric_for_best_model is None and self.compares_evaluations:
            object.__setattr__(self, "metric_for_best_model", "reward")
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            greater = not self.metric_for_best_model.endswith("loss")
            object.__setattr__(self, "greater_is_better", greater)
        check(self)

    if not TYPE_CHECKING:  # a type checker shall still find misspelt options

        def __setattr__(self, name: str, value: Any) -> None:
            if self._fixed:
                raise ValueError(
                    f"{name} cannot be changed: a trainer has these options; give another trainer "
                    f"a copy, dataclasses.replace(args, {name}=...)"
                )
            if name == "preset":
                raise ValueError(
                    "preset is given when the options are made, RLOOConfig(preset=...): it says "
                    "what those are that are not given"
                )
            for ours, read in resolve({name: value}, option_types()).items():
                object.__setattr__(self, ours, read)

        def __getattr__(self, name: str) -> Any:
            # Scripts written for TRL read options that are refused here (`if args.deepspeed:`), by
            # the names that they have there, and what Trainer derives (`if args.should_save:`).
            if name in REFUSED and REFUSED[name][0]:
                return REFUSED[name][0][0]
            if name in WITHOUT_EFFECT:
                return WITHOUT_EFFECT[name][0]
            if name in ONE_PROCESS:
                return ONE_PROCESS[name]
            if name in ALIASES and name not in CONVERSIONS:
                return getattr(self, ALIASES[name][0])
            raise AttributeError(f"RLOOConfig has no option {name}{suggest(name, option_types())}")

    def completions_per_step(self, world_size: int = 1) -> int:
        """Completions that one optimizer step learns from, over all processes."""
        per_device = self.per_device_train_batch_size
        accumulation = self.gradient_accumulation_steps
        by_batch_size = per_device * accumulation * world_size
        if self.num_prompts is None:
            return by_batch_size
        by_prompts = self.num_prompts * self.num_generations
        untouched = (per_device, accumulation) == DEFAULT_BATCH
        if not untouched and by_batch_size != by_prompts:
            raise ValueError(
                f"num_prompts {self.num_prompts} * num_generations {self.num_generations} is "
                f"{by_prompts} completions per step, but per_device_train_batch_size {per_device} "
                f"* gradient_accumulation_steps {accumulation} * {world_size} process(es) is "
                f"{by_batch_size}; leave the batch sizes out when num_prompts is given"
            )
        return by_prompts

    def completions_per_rollout(self, world_size: int = 1) -> int:
        """Completions sampled at once, over all processes: TRL's generation batch.

        Feeds whole optimizer steps: TRL's rarer cases, where a step begins in one pass over the
        rollout and ends in the next, are refused.
        """
        step = self.completions_per_step(world_size)
        accumulation = self.gradient_accumulation_steps
        if self.generation_batch_size is None:
            micro_steps = self.steps_per_generation or accumulation
            if micro_steps % accumulation:
                raise ValueError(
                    f"steps_per_generation is {micro_steps}, not a multiple of "
                    f"gradient_accumulation_steps {accumulation}; a rollout feeds whole optimizer "
                    "steps"
                )
            return step * (micro_steps // accumulation)
        if self.generation_batch_size % step:
            raise ValueError(
                f"generation_batch_size is {self.generation_batch_size}, not a multiple of the "
                f"{step} completions of an optimizer step; a rollout feeds whole optimizer steps "
                "(num_prompts, steps_per_generation)"
            )
        return self.generation_batch_size

    def prompts_per_rollout(self, world_size: int = 1) -> int:
        """Prompts drawn for one rollout; each gets `num_generations` completions."""
        completions = self.completions_per_rollout(world_size)
        if completions % self.num_generations:
            raise ValueError(
                f"a rollout has {completions} completions (per_device_train_batch_size "
                f"{self.per_device_train_batch_size}), not a multiple of num_generations "
                f"{self.num_generations}; set num_prompts (prompts per optimizer step) and leave "
                "the batch sizes out"
            )
        return completions // self.num_generations

    def steps_per_rollout(self, world_size: int = 1) -> int:
        """Optimizer steps that one rollout serves: num_iterations * steps_per_generation /
        gradient_accumulation_steps."""
        rollout = self.completions_per_rollout(world_size)
        return self.num_iterations * (rollout // self.completions_per_step(world_size))

    def fixed(self) -> RLOOConfig:
        """An equal copy, everything checked. Neither can be changed by assignment from now on."""
        copy = replace(self)
        for config in (self, copy):
            object.__setattr__(config, "_fixed", True)
        return copy

    @property
    def loss_form(self) -> LossForm:
        """What the preset does to the loss and no option says."""
        return loss_form(self.preset)

    @property
    def compares_evaluations(self) -> bool:
        """Whether something follows from which evaluation was the best."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    def to_dict(self) -> dict[str, Any]:
        """The resolved options as JSON types; `RLOOConfig(**config.to_dict()) == config`, but for
        `hub_token`, which is null here: what is written down holds no secret."""
        return {
            field.name: list(value) if isinstance(value, tuple) else deepcopy(value)
            for field in fields(self)
            for value in [None if field.name == "hub_token" else getattr(self, field.name)]
        }


@cache
def option_types() -> dict[str, Any]:
    """Our option names and their annotations, in the order of declaration."""
    return typing.get_type_hints(RLOOConfig)


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every option about adapters at its default: none is added."""
    defaults: dict[str, Any] = {
        field.name: field.default for field in fields(config) if field.name in ADAPTER_OPTIONS
    }
    return replace(config, **defaults)


def resolve_interval(steps: float, total_steps: int) -> int:
    """Optimizer steps between two events: `steps`, or that share of `total_steps` when below 1."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
