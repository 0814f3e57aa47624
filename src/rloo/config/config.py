"""RLOOConfig: the options of a run as one value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from rloo.config.async_validation import correction_of
from rloo.config.compat import deepspeed_config
from rloo.config.compat.accelerate_env import launched_options
from rloo.config.compat.aliases import (
    ALIASES,
    CONVERSIONS,
    GLOBAL_BATCH,
    READ_AS,
    hint_of_grpo,
    resolve,
    with_prompts,
)
from rloo.config.compat.generation_kwargs import sampling_options
from rloo.config.compat.parser_fields import ConfigSignature, option_types, parser_fields
from rloo.config.compat.training_arguments_mixin import TrainingArgumentsMixin, setter_of
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.fields import ConfigErrors, default_of, suggest
from rloo.config.options import DEFAULT_BATCH, DEFAULT_GROUP, LORA
from rloo.config.presets import LossForm, loss_form, over_preset
from rloo.config.reasoning_gym_options import follows_from_gym
from rloo.config.secrets import hide
from rloo.config.validation import check, out_of_range
from rloo.config.vllm_options import OPTIONS, VLLMOptions, engine_of

# The options that say how long a run is.
LENGTH = ("max_steps", "num_train_epochs")
# Shared options whose default is not TRL's: name -> (TRL's, ours, reason).
DEVIATIONS: dict[str, tuple[Any, Any, str]] = {
    "output_dir": (
        None, "rloo_output", "TRL resolves null to trainer_output; ours says what made it",
    ),
    "vllm_enable_sleep_mode": (
        False, None, "servers on the trainer's own GPU would keep the memory that it needs",
    ),
}  # fmt: skip
# To a parser of dataclasses the class shows other fields than to type checkers and editors.
if TYPE_CHECKING:
    Base = TrainingArgumentsMixin
else:
    Base = parser_fields()


@dataclass(repr=False, eq=False)
class RLOOConfig(Base):
    """The options of a run. Takes every field by keyword, and every alias
    (`rloo.config.compat.aliases`).

    Raises ValueError for an unknown option, a value of the wrong type or out of range, options
    that contradict each other, and an option of TRL or transformers that this version does not
    implement, set to anything but its default. Change one with `dataclasses.replace`, or as scripts
    for TRL do, by assignment: what contradicts others is then refused by the trainer, which has a
    fixed copy of the options that it is given. A dataclass that inherits from it may have fields of
    its own, which are the script's, and other defaults.
    """

    _fixed = False
    _checked = None
    _named = frozenset[str]()
    __signature__ = ConfigSignature()

    if not TYPE_CHECKING:  # type checkers and editors shall see the fields, and misspelt options

        def __init__(self, output_dir: str | None = None, **options: Any) -> None:
            if output_dir is not None:
                options["output_dir"] = output_dir
            given, own = self._given(options)
            changed = resolve(_changed_defaults(type(self)), option_types())
            named = changed | resolve(given, option_types())
            values = over_preset(named)
            values = with_prompts({"num_generations": DEFAULT_GROUP, **values})
            hint_of_grpo(given)
            values |= sampling_options(values.get("generation_kwargs"))
            values |= launched_options(values)
            values |= deepspeed_config.options_of(values)
            defaults = {option.name: default_of(option) for option in (*fields(self), *OPTIONS)}
            vars(self).update(defaults | _idle_of(given) | own | values, _named=frozenset(named))
            if missing := [name for name, value in vars(self).items() if value is MISSING]:
                raise TypeError(f"{type(self).__name__} needs {', '.join(missing)}")
            self.__post_init__()

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            # The decorator `dataclass` writes none of these where it finds one.
            for name in ("__init__", "__eq__", "__repr__"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(cls, name))

        def __setattr__(self, name: str, value: Any) -> None:
            if name in own_fields(type(self)) or (
                name not in known_names() and (hasattr(type(self), name) or is_own(name))
            ):
                object.__setattr__(self, name, value)
                return
            taken = vars(self).get("_taken")
            if name not in LENGTH and (self._fixed or (taken is not None and taken.training)):
                raise ValueError(_cannot_change(name))
            if name == "preset":
                raise ValueError(
                    "preset cannot be assigned; give it when the options are made, "
                    "RLOOConfig(preset=...), because it sets the defaults of others"
                )
            resolved = resolve({name: value}, option_types())
            if GLOBAL_BATCH in resolved:
                group = {"num_generations": self.num_generations}
                resolved = with_prompts(resolved | group)
            if taken is not None:
                taken.take(resolved)
            named = self._named | resolved.keys()
            vars(self).update(resolved | _idle_of({name: value}), _named=named)

        def __getattr__(self, name: str) -> Any:
            # Scripts written for TRL read options that are refused here, or idle (`if
            # args.dtype:`), by the names that they have there.
            if name in READ_AS:
                return READ_AS[name](self)
            if name.startswith("set_"):  # TrainingArguments' own, which assign options
                return setter_of(self, name)
            if name in REFUSED and REFUSED[name][0]:
                return REFUSED[name][0][0]
            if name in WITHOUT_EFFECT:
                return WITHOUT_EFFECT[name][0]
            if name == GLOBAL_BATCH:
                return self.per_device_train_batch_size  # as in TrainingArguments
            if name in ALIASES and name not in CONVERSIONS:
                return getattr(self, ALIASES[name][0])
            raise AttributeError(f"RLOOConfig has no option {name}{suggest(name, option_types())}")

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
        check(self)
        own["_checked"] = self._values()

    def _given(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of `options` those that are ours, and those of a subclass's own fields. A parser of
        dataclasses gives every field that it sees, so that what is at its default was not asked
        for: a preset may set it."""
        defaults = {field.name: default_of(field) for field in fields(self)}
        if options.keys() == defaults.keys():
            options = {name: v for name, v in options.items() if v != defaults[name]}
        own = {n: value for n, value in options.items() if n in own_fields(type(self))}
        return {n: value for n, value in options.items() if n not in own}, own

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
            raise ValueError(_cannot_change(name))
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


def own_fields(kind: type[RLOOConfig]) -> frozenset[str]:
    """The fields that a subclass has added, and that are no options."""
    return frozenset(kind.__dataclass_fields__.keys() - RLOOConfig.__dataclass_fields__)


def is_own(name: str) -> bool:
    """Whether an attribute that a script puts on its options is like none of them: it is the
    script's, and no misspelt option."""
    return not get_close_matches(name, known_names(), n=1, cutoff=0.8)


def own_attributes(config: RLOOConfig) -> dict[str, Any]:
    """What a script has put on `config` besides options, by name."""
    mine = {*known_names(), *own_fields(type(config))}
    return {n: value for n, value in vars(config).items() if n[0] != "_" and n not in mine}


def _changed_defaults(kind: type[RLOOConfig]) -> dict[str, Any]:
    """The options whose defaults a subclass has changed."""
    ours = {option.name: default_of(option) for option in OPTIONS}
    theirs = {field.name: default_of(field) for field in fields(kind) if field.name in ours}
    return {name: value for name, value in theirs.items() if value != ours[name]}


def _idle_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options without effect among `options`, as they were given."""
    return {name: value for name, value in options.items() if name in WITHOUT_EFFECT}


@cache
def known_names() -> tuple[str, ...]:
    """Every name that an option may be given by, also those that are refused or idle."""
    return (*option_types(), *ALIASES, *REFUSED, *WITHOUT_EFFECT)


def without_adapter(config: RLOOConfig) -> RLOOConfig:
    """`config` with every option about adapters at its default: none is added."""
    return config.with_values(
        **{field.name: field.default for field in LORA.fields_of(VLLMOptions)}
    )


def _cannot_change(name: str) -> str:
    return (
        f"{name} cannot be changed: these options belong to a trainer; give another trainer a "
        f"copy, dataclasses.replace(args, {name}=...)"
    )


@dataclass
class AssignedOptions:
    """The values assigned to the options that a trainer was given, since it has a copy of them."""

    asked: dict[str, Any] = field(default_factory=dict)
    training: bool = False

    def take(self, values: Mapping[str, Any]) -> None:
        """Raises ValueError for a value out of range."""
        if faults := [f"{n} is {v}; it {rule}" for n, v, rule in out_of_range(values)]:
            raise ConfigErrors(faults)
        self.asked.update(values)


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
        remote_workers=None,
        reward_workers=None,
        partial_rollouts=False,
    )


def resolve_interval(steps: float, total_steps: int) -> int:
    """Optimizer steps between two events: `steps`, or that share of `total_steps` when below 1."""
    return int(steps) if steps >= 1 else max(1, math.ceil(steps * total_steps))
