"""Options as dataclass fields with help, and the conversion of values to the types of options."""

from __future__ import annotations

import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from functools import reduce
from numbers import Integral, Real
from operator import or_
from typing import Any

from rloo import plugins

TRUE_WORDS = ("true", "yes", "1")
FALSE_WORDS = ("false", "no", "0")
NULL_WORDS = ("none", "null")
# Rejects 010 (8 in YAML 1.1), and 1_000 and non-ASCII digits, which Python accepts.
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
SHARED = ("TRL", "Unsloth", "ms-swift")
# tier of options -> who sets them
TIERS = {
    "basic": "most runs set these",
    "advanced": "some runs set these",
    "expert": "few runs need these",
}


class ConfigErrors(ValueError):
    """Raised with all faults of an input, one text per fault."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("; ".join(faults))


def config_errors(error: Exception) -> list[str]:
    """The faults that an error reports, one text per fault."""
    return error.faults if isinstance(error, ConfigErrors) else [str(error)]


@dataclass(frozen=True)
class OptionGroup:
    """A group of options with one subject. Each option has a tier: most runs set the `basic`
    options, some runs set advanced options, and few runs need `expert` options. A `secret` option
    is not part of the repr."""

    name: str

    def shared(
        self,
        default: Any,
        help: str,
        *,
        secret: bool = False,
        basic: bool = False,
        expert: bool = False,
    ) -> Any:
        """Declare an option that TRL, Unsloth and ms-swift have under the same name. Most such
        options are from transformers."""
        return option_field(default, self.about(help, SHARED, basic, expert), shown=not secret)

    def from_trl(self, default: Any, help: str, *, expert: bool = False) -> Any:
        """Declare an option that TRL's RLOOConfig (and thus Unsloth) has under the same name."""
        return option_field(default, self.about(help, ("TRL", "Unsloth"), expert=expert))

    def from_ms_swift(
        self, default: Any, help: str, *, basic: bool = False, expert: bool = False
    ) -> Any:
        """Declare an option that ms-swift has under the same name, but TRL's RLOOConfig has not."""
        return option_field(default, self.about(help, ("ms-swift",), basic, expert))

    def rloo(self, default: Any, help: str, *, basic: bool = False, expert: bool = False) -> Any:
        """Declare an option that TRL, Unsloth and ms-swift do not have under the same name."""
        return option_field(default, self.about(help, (), basic, expert))

    def about(
        self, help: str, systems: tuple[str, ...], basic: bool = False, expert: bool = False
    ) -> dict[str, Any]:
        """The metadata of a field: help, subject, tier, and the systems that have the option."""
        tier = "basic" if basic else "expert" if expert else "advanced"
        return {"help": help, "subject": self.name, "systems": systems, "tier": tier}

    def fields_of(self, options: Any) -> list[Field[Any]]:
        """The options of this group in a dataclass or an instance of one."""
        return [field for field in fields(options) if field.metadata.get("subject") == self.name]


def option_field(default: Any, about: dict[str, Any], shown: bool = True) -> Any:
    """A dataclass field with `default` and the metadata `about`. It is in the repr only if
    `shown`."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=about)
    return field(default=default, repr=shown, metadata=about)


def default_of(option: Field[Any]) -> Any:
    """The default with which an option is declared. The value in a run may be derived from other
    options."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def suggest(name: str, known: typing.Iterable[str]) -> str:
    """The hint `; did you mean X?` with the most similar known name, or an empty string if no known
    name is similar."""
    alike = get_close_matches(name, list(known), n=3, cutoff=0.6)
    if "_" in name:  # a word or most letters must be equal
        nearer, words = get_close_matches(name, alike, n=3, cutoff=0.75), set(name.split("_"))
        alike = [one for one in alike if one in nearer or words & set(one.split("_"))]
    return f"; did you mean {alike[0]}?" if alike else ""


def coerce(name: str, hint: Any, value: Any) -> Any:
    """`value` converted to the type of the annotation `hint`. Text (of YAML or a shell) is parsed.

    Raises ValueError with the option's name if the value is of another type, not finite, or not one
    of the choices. A float is never truncated to an int, and a number is never converted to a bool.
    """
    if isinstance(value, Enum):
        value = value.value
    kinds = kinds_of(hint)
    nullable = type(None) in kinds
    kinds = [kind for kind in kinds if kind is not type(None)]
    literals = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
    choices = [choice for kind in literals for choice in typing.get_args(kind)]
    if nullable and (value is None or _is_word(value, NULL_WORDS)):
        return None
    if choices and name == "rollout_engine":  # other packages may add engines
        choices += plugins.of_others("engines")
    if choices:
        return _choose(name, choices, value)
    if value is None:
        raise ValueError(f"{name} is null; it must be {_describe(kinds)}")
    if isinstance(value, str):
        value = _opened(kinds, value)
    if isinstance(value, str) and str in kinds:
        kinds = [kind for kind in kinds if typing.get_origin(kind) is not list]
    for kind in sorted(kinds, key=lambda kind: kind is str):
        result = _read(name, kind, value)
        if result is not None:
            return result
    raise ValueError(f"{name} is {value!r}; it must be {_describe(kinds)}")


def kinds_of(hint: Any) -> list[Any]:
    """The types that the annotation `hint` allows, including NoneType."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return list(typing.get_args(hint)) if is_union else [hint]


def not_null(hint: Any) -> Any:
    """The annotation `hint` without None."""
    return reduce(or_, (kind for kind in kinds_of(hint) if kind is not type(None)))


def _is_word(value: Any, words: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value.strip().lower() in words


def _choose(name: str, choices: list[str], value: Any) -> str:
    if value is None and "none" in choices:
        return "none"
    if value is False and "no" in choices:  # YAML 1.1 reads a bare `no` as false
        return "no"
    if value in choices:
        return value
    near = suggest(value, choices) if isinstance(value, str) else ""
    raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}{near}")


def _describe(kinds: list[Any]) -> str:
    words = {
        bool: "true or false", int: "a whole number", float: "a number", dict: "a mapping",
        str: "text (in quotes where YAML reads a number)", list: "a list",
        tuple: "a pair of numbers",
    }  # fmt: skip
    return " or ".join(words[typing.get_origin(kind) or kind] for kind in kinds)


def _read(name: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`, or None if it cannot be converted."""
    container = typing.get_origin(kind)
    if container in (list, tuple, dict):
        return _read_container(name, container, typing.get_args(kind)[0], value)
    if kind is bool:
        return _read_switch(value)
    if kind in (int, float):
        return _read_number(name, kind, value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _text(name, value) if isinstance(value, str) else None


def _text(name: str, value: str) -> str:
    if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        raise ValueError(
            f"{name} is {value!r}; text cannot have NUL or half a surrogate pair ({name})"
        )
    return value


def _read_switch(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    if _is_word(value, TRUE_WORDS):
        return True
    return False if _is_word(value, FALSE_WORDS) else None


def _read_number(name: str, kind: Any, value: Any) -> Any:
    numeric = Integral if kind is int else Real
    if isinstance(value, bool) or not isinstance(value, numeric | str):
        return None
    if kind is int and isinstance(value, str) and not WHOLE.fullmatch(value.strip()):
        return None
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        return None
    if kind is float and not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be a finite number")
    return number


def _opened(kinds: list[Any], text: str) -> Any:
    """The JSON list or mapping in `text`, if one of `kinds` is a list or mapping; else `text`."""
    containers = {"[": (list, tuple), "{": (dict,)}.get(text.lstrip()[:1], ())
    if any(typing.get_origin(kind) in containers for kind in kinds):
        with suppress(json.JSONDecodeError):
            return json.loads(text)
    return text


def _read_container(name: str, container: Any, kind: Any, value: Any) -> Any:
    if container is dict:
        return _plain(name, value) if isinstance(value, Mapping) else None
    several = isinstance(value, list | tuple)
    if isinstance(value, Mapping) or (container is tuple and not (several and len(value) == 2)):
        return None
    return container(coerce(name, kind, item) for item in (value if several else [value]))


def _plain(path: str, value: Any) -> Any:
    """A copy with JSON types only, so that the resolved configuration can be saved."""
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}; it must be a finite number")
    if isinstance(value, str):
        return _text(path, value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if str(value).startswith("torch."):  # a dtype: transformers accepts its name, too
        return str(value).removeprefix("torch.")
    if hasattr(value, "to_diff_dict"):  # a transformers configuration (quantization_config)
        given = value.to_diff_dict().items()
        return _plain(path, {name: item for name, item in given if name[0] != "_"})
    raise ValueError(f"{path} is {value!r}; it must be text, a number, a switch, a list or null")
