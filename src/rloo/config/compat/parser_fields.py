"""The dataclass interface of RLOOConfig: the fields from which parsers (transformers'
HfArgumentParser, TRL's TrlParser) build flags, and the signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from dataclasses import InitVar, make_dataclass
from functools import cache
from typing import Any, TypeVar

from rloo.config.compat.aliases import SECOND_FIELDS, our_name
from rloo.config.compat.unsupported import NOT_OF_RLOO_CONFIG, REFUSED, WITHOUT_EFFECT
from rloo.config.fields import default_of, option_field
from rloo.config.options import LORA, OPTIONS, QUANTISATION, TrainingOptions

Options = TypeVar("Options", bound=TrainingOptions)
# Options that are not part of `args` in TRL. TRL's scripts parse them separately, with ModelConfig,
# ScriptArguments or classes of the script, whose flags have the same names.
OF_SCRIPTS = {
    "model", "dataset", "dataset_config", "dataset_split", "eval_dataset", "eval_split", "reward",
    *(option.name for about in (LORA, QUANTISATION) for option in about.fields_of(TrainingOptions)),
}  # fmt: skip
# option of TRL that is refused or has no effect here -> (default, help)
_OTHERS: dict[str, tuple[Any, str]] = {
    **{n: (values[0], f"Refused: {why}.") for n, (values, why) in REFUSED.items() if values},
    **{n: (default, f"No effect: {why}.") for n, (default, why) in WITHOUT_EFFECT.items()},
}


@cache
def option_types() -> dict[str, Any]:
    """Our option names and their annotations, in the order of declaration."""
    return typing.get_type_hints(TrainingOptions)


def shown_to_parsers(kind: type[Options]) -> type[Options]:
    """Give `kind`, a base class of RLOOConfig, the fields from which parsers build flags, and
    return `kind`. The fields are our options and options of TRL, each with a type that parsers
    support. Options that TRL's scripts parse separately (`OF_SCRIPTS`) are InitVars, which parsers
    ignore and `dataclasses.replace` accepts. Type checkers and editors still read the fields of
    `TrainingOptions`."""
    shown = make_dataclass(
        "Shown", _fields(), bases=(TrainingOptions,), init=False, repr=False, eq=False, kw_only=True
    )
    kind.__annotations__ = kind.__annotations__ | shown.__annotations__
    kind.__dataclass_fields__ = shown.__dataclass_fields__  # type: ignore[attr-defined]
    return kind


def _fields() -> Iterator[tuple[str, Any, Any]]:
    hints = option_types()
    for option in OPTIONS:
        hint, default = hints[option.name], default_of(option)
        if option.name in OF_SCRIPTS:
            # An InitVar cannot have a default_factory.
            unseen: Any = InitVar[hint]  # type: ignore[valid-type]
            yield option.name, unseen, None if isinstance(default, list) else default
        else:
            about = {"help": option.metadata["help"]}
            yield option.name, _parseable(hint), option_field(default, about, shown=option.repr)
    for name in SECOND_FIELDS:
        ours = our_name(name)
        yield (
            name,
            _parseable(hints[ours] | None),
            option_field(None, {"help": f"The same as {ours}."}),
        )
    for name, (default, meaning) in _OTHERS.items():
        if "." not in name and name not in NOT_OF_RLOO_CONFIG:
            kind = list[str] if isinstance(default, list) else type(default)
            hint = str | None if default is None else kind
            yield name, hint, option_field(default, {"help": meaning})


def _parseable(hint: Any) -> Any:
    """`hint`, or the most similar type that an argument parser supports. RLOOConfig parses the
    text."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) is list and typing.get_args(kinds[0]):
        return list[str]
    containers = [typing.get_origin(kind) for kind in kinds]
    if tuple in containers:
        return list[float] | None
    # In a union of three types the parser uses the second type, so these options are text.
    if dict in containers:
        return dict[str, Any] | str | None
    if list in containers and str in kinds:
        return list[str] | str | None
    return str | None if bool in kinds and str in kinds else hint


class ConfigSignature:
    """The signature of a class and its subclasses: `output_dir`, then all fields as keywords."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        ours = {option.name: option for option in OPTIONS}
        hints = option_types()
        found = owner.__dataclass_fields__  # type: ignore[attr-defined] # with the InitVars
        return inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY
                    if name != "output_dir"
                    else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=default_of(ours.get(name, field)),
                    annotation=hints.get(name, field.type),
                )
                for name, field in sorted(found.items(), key=lambda item: item[0] != "output_dir")
            ]
        )
