"""The base class of RLOOConfig, for scripts written for TRL: aliases, options of TRL without effect
here, assignment, inheritance, dataclass parsers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rloo.config.compat import deepspeed_config, retired
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
from rloo.config.compat.parser_fields import ConfigSignature, option_types, shown_to_parsers
from rloo.config.compat.training_arguments_mixin import TrainingArgumentsMixin, setter_of
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.fields import ConfigErrors, default_of, suggest
from rloo.config.options import DEFAULT_GROUP, OPTIONS
from rloo.config.presets import over_preset
from rloo.config.validation import out_of_range

# The run length. A script may assign these options after a trainer has copied the options.
LENGTH = ("max_steps", "num_train_epochs")


@shown_to_parsers
class TRLCompatibleOptions(TrainingArgumentsMixin):
    """The base class of RLOOConfig, with the features that scripts for TRL need and that a
    dataclass does not have.

    The decorator `dataclass` writes `__init__`, `__eq__` and `__repr__` unless a class defines
    them. `__init_subclass__` copies these methods of the base class into each subclass. A script's
    dataclass therefore accepts every name that RLOOConfig accepts.
    """

    _fixed = False
    _checked: dict[str, Any] | None = None
    _named = frozenset[str]()
    __signature__: ClassVar[ConfigSignature] = ConfigSignature()

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

    def __post_init__(self) -> None:
        """Overridden by RLOOConfig, which derives and checks options."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__init__", "__eq__", "__repr__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in own_fields(type(self)) or (
            name not in known_names() and (hasattr(type(self), name) or is_own(name))
        ):
            object.__setattr__(self, name, value)
            return
        if name in retired.NAMES:
            name, value = retired.assigned(self, name, value)
            if not name:
                return
        taken = vars(self).get("_taken")
        if name not in LENGTH and (self._fixed or (taken is not None and taken.training)):
            raise ValueError(cannot_change(name))
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

    if not TYPE_CHECKING:  # type checkers must see fields and report misspelt options

        def __getattr__(self, name: str) -> Any:
            # Scripts written for TRL also read options that are refused or have no effect here, by
            # the names in TRL (`if args.dtype:`).
            if name in READ_AS:
                return READ_AS[name](self)
            if name.startswith("set_"):  # methods of TrainingArguments that assign options
                return setter_of(self, name)
            if name in REFUSED and REFUSED[name][0]:
                return REFUSED[name][0][0]
            if name in WITHOUT_EFFECT:
                return WITHOUT_EFFECT[name][0]
            if name == GLOBAL_BATCH:
                return self.per_device_train_batch_size  # as in TrainingArguments
            if name in ALIASES and name not in CONVERSIONS:
                return getattr(self, ALIASES[name][0])
            if name in retired.NAMES:
                return retired.value_of(self, name)
            raise AttributeError(f"RLOOConfig has no option {name}{suggest(name, option_types())}")

    def _given(self, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """`options` split into our options and the fields of a subclass. A dataclass parser passes
        every field that it knows. Options with their default values therefore do not count as set,
        and a preset may set them."""
        defaults = {field.name: default_of(field) for field in fields(self)}
        if options.keys() == defaults.keys():
            options = {name: v for name, v in options.items() if v != defaults[name]}
        own = {n: value for n, value in options.items() if n in own_fields(type(self))}
        return {n: value for n, value in options.items() if n not in own}, own


@dataclass
class AssignedOptions:
    """The values that a script assigned to its options after the trainer copied the options."""

    asked: dict[str, Any] = field(default_factory=dict)
    training: bool = False

    def take(self, values: Mapping[str, Any]) -> None:
        """Record assigned values. Raises ValueError for a value out of range."""
        if faults := [f"{n} is {v}; it {rule}" for n, v, rule in out_of_range(values)]:
            raise ConfigErrors(faults)
        self.asked.update(values)


def own_fields(kind: type[TRLCompatibleOptions]) -> frozenset[str]:
    """The names of the fields that a subclass has added. These fields are no options."""
    return frozenset(kind.__dataclass_fields__.keys() - TRLCompatibleOptions.__dataclass_fields__)


def is_own(name: str) -> bool:
    """Whether the name of an attribute that a script sets is similar to no option's name. Such an
    attribute belongs to the script and is not a misspelt option."""
    return not get_close_matches(name, known_names(), n=1, cutoff=0.8)


@cache
def known_names() -> tuple[str, ...]:
    """Every accepted name of an option, including refused, ineffective and retired names."""
    return (*option_types(), *ALIASES, *REFUSED, *WITHOUT_EFFECT, *retired.NAMES)


def cannot_change(name: str) -> str:
    """The error text for an assignment to an option after a trainer has copied the options."""
    return (
        f"{name} cannot be changed: these options belong to a trainer; give another trainer a "
        f"copy, dataclasses.replace(args, {name}=...)"
    )


def _changed_defaults(kind: type[TRLCompatibleOptions]) -> dict[str, Any]:
    """The options whose defaults a subclass has changed."""
    ours = {option.name: default_of(option) for option in OPTIONS}
    theirs = {field.name: default_of(field) for field in fields(kind) if field.name in ours}
    return {name: value for name, value in theirs.items() if value != ours[name]}


def _idle_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options in `options` that have no effect, with unchanged values."""
    return {name: value for name, value in options.items() if name in WITHOUT_EFFECT}
