"""Parses configurations: a YAML file, and a command line that overrides the file."""

from __future__ import annotations

import json
import os
import typing
import warnings
from typing import Any

from rloo.config.compat import retired
from rloo.config.compat.aliases import (
    GLOBAL_BATCH,
    SHORT,
    hint_of_grpo,
    implied_by,
    our_name,
    resolve,
    suggest_option,
)
from rloo.config.compat.detect_system import is_script, refuse_foreign
from rloo.config.compat.parser_fields import option_types
from rloo.config.compat.recipes import read_recipe, refuse_other
from rloo.config.compat.trl_compatible_options import known_names
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.config import RLOOConfig
from rloo.config.fields import NULL_WORDS, ConfigErrors, config_errors, kinds_of, suggest
from rloo.config.kwargs_options import KWARGS, key_types
from rloo.config.presets import BASE
from rloo.config.yaml_io import read_value, read_yaml

# Options whose value may be a function in a file; below, options that may be a file or folder.
FUNCTION_OPTIONS = ("reward", "eval_reward", "estimator")
YAML_SUFFIXES = (".yaml", ".yml")
PATH_OPTIONS = ("model", "dataset", "eval_dataset", "resume_from_checkpoint", *FUNCTION_OPTIONS)


def parse_command_line(arguments: list[str], base: str | None = None) -> RLOOConfig:
    """Read `[config.yaml] [--option value | --option=value | --switch | option=value] ...`.

    Dashes and underscores in option names are equivalent; aliases and dotted names are accepted. A
    list is given as several values after its option, or by repeating the option. A mapping, or a
    list of mappings, is YAML or JSON. `--mapping.name value` adds one entry to the file's mapping.
    The command line overrides the file, and the last value of any other repeated option counts. If
    neither the command line nor the file names a model or data, the file `base` is also read, with
    the lowest priority: its options are not `named`. Raises ValueError with all faults, each with
    the option, or with file and line.
    """
    path, given, faults = _split(arguments)
    path = os.path.expanduser(path) if path and path.startswith("~/") else path
    written, lines = _written(path, faults)
    if "model_revision" in given:
        given["model_init_kwargs.revision"] = given.pop("model_revision")
    written = {name: value for name, value in written.items() if name not in given}
    hint_of_grpo({*given, *({"preset"} if written else ())})
    entries = {name: given.pop(name) for name in list(given) if _is_entry(name)}
    faults += [
        f"{name} and {place} are both given; they are one option, so give only {place}"
        for name in given
        if (place := retired.place_of(name)) in entries
    ]
    before = len(faults)
    values = _resolved(written, lines, faults)
    if path and len(faults) > before:
        refuse_foreign(path)
    named = {*values, *map(our_name, given)} & {"model", "dataset", "eval_dataset"}
    unnamed: set[str] = set()
    if base is not None and not named:
        below = _resolved(*_written(base, faults), faults)
        if "preset" in values:
            below = {name: value for name, value in below.items() if name not in BASE}
        unnamed = below.keys() - values.keys()
        values = _under(below, values, written)
    if "preset" in given:  # a resolved file sets the whole objective
        values = {name: value for name, value in values.items() if name not in BASE}
    if path:
        values = {name: _beside(path, name, value) for name, value in values.items()}
    given = {name: _at_home(name, value) for name, value in given.items()}
    values = {name: _at_home(name, value) for name, value in values.items()}
    types = dict(option_types())
    types |= {name: retired.kind_of(name) for name in given if name in retired.NAMES}
    given = {n: _with_mappings(types.get(our_name(n)), value) for n, value in given.items()}
    line = retired.over_file(_resolved(given, {}, faults), values, given)
    values = _under(values, line, given)
    if faults:
        raise ConfigErrors(faults)
    for name, text in entries.items():
        option, _, entry = name.partition(".")
        values[option] = {**(values.get(option) or {}), **_entry(values, option, entry, text)}
    config, user = RLOOConfig(**values), {*line, *(name.partition(".")[0] for name in entries)}
    return config.without_named(unnamed - user)


# Options that set the number of completions of an optimizer step.
_SIZES = ("num_prompts", GLOBAL_BATCH, "per_device_train_batch_size")


def _under(values: dict[str, Any], line: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The values `line` of the command line, merged over a file's `values`. The file overrides
    values of `line` that are only implied by the options `given`. A batch size on the command line
    also removes the file's other options for the batch size."""
    soft = implied_by(given) - {our_name(name) for name in given}
    line = {name: value for name, value in line.items() if name not in soft & values.keys()}
    sized = [name for name in _SIZES if name in line]
    dropped = [name for name in _SIZES if name not in line] if sized else []
    whole = sized and sized != ["per_device_train_batch_size"]
    if whole and "steps_per_generation" not in values:  # its unit is accumulation steps
        dropped.append("gradient_accumulation_steps")
    return {name: value for name, value in values.items() if name not in dropped} | line


def given_names(arguments: list[str]) -> set[str]:
    """Our names of the options on a command line, and `config` if it has a configuration file."""
    path, given, _ = _split(arguments)
    return {our_name(name) for name in given} | ({"config"} if path else set())


def _written(path: str | None, faults: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    if path is None:
        return {}, {}
    try:
        written, lines = read_config_file(path)
    except ValueError as error:
        faults += config_errors(error)
        return {}, {}
    try:
        refuse_other(path, written, known_names())
        return read_recipe(written), lines
    except ValueError:
        refuse_foreign(path)
        raise


def _resolved(given: dict[str, Any], lines: dict[str, str], faults: list[str]) -> dict[str, Any]:
    try:
        return resolve(given, option_types(), where=lines)
    except ValueError as error:
        faults += config_errors(error)
        return {}


def read_config_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values in a configuration file, and the line of each, as `read_yaml` returns them. An
    option that is a mapping is a single value."""
    return read_yaml(path, known_names().__contains__)


def _at_home(name: str, value: Any) -> Any:
    """`value` with `~/` expanded. Shells do not expand it in `--model=~/m`, nor does YAML."""
    if our_name(name) not in (*PATH_OPTIONS, "output_dir", "deepspeed"):
        return value
    if isinstance(value, list):
        return [_at_home(name, item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) and value[:2] == "~/" else value


def _beside(path: str, name: str, value: Any) -> Any:
    """`value` as a path: in the current folder if it exists there, else in the YAML file's
    folder."""
    if name not in PATH_OPTIONS:
        return value
    if isinstance(value, list):
        return [_beside(path, name, item) for item in value]
    if isinstance(value, dict) and "name" in value:
        return {**value, "name": _beside(path, name, value["name"])}
    if not isinstance(value, str):
        return value
    is_model = (
        name in ("reward", "eval_reward") and "/" in value and ":" not in value
    )  # a reward model's folder
    is_path = is_model or name not in FUNCTION_OPTIONS
    file, colon, function = (value, "", "") if is_path else value.rpartition(":")
    candidate = os.path.join(os.path.dirname(path), file)
    if not file or os.path.exists(file) or not os.path.exists(candidate):
        return value
    return candidate + colon + function


def _is_entry(name: str) -> bool:
    """Whether `name` is `option.entry` for an option that is a mapping."""
    option, dot, _ = name.partition(".")
    return bool(dot) and option in option_types() and dict in _kinds(option)


def _entry(values: dict[str, Any], option: str, entry: str, text: Any) -> dict[str, Any]:
    """An entry from a shell, parsed as its declared type, if the key has a type. An entry of an
    inner mapping may be set: `dataset_kwargs.config.chain_sum.max_terms 3`."""
    name, dot, rest = entry.partition(".")
    if option not in KWARGS:
        return {entry: _as_value(text)}
    kind = key_types(option).get(name)
    if dot and dict in _origins(kind):
        inner = (values.get(option) or {}).get(name) or {}
        return {name: {**inner, rest: _as_value(text)}}
    return {entry: _with_mappings(kind, text)}


def _as_value(text: str) -> Any:
    """An entry from a shell without a declared type, parsed as JSON if possible, else as text."""
    try:
        word = text.lower()
        return json.loads(word if word in ("true", "false") else text)
    except ValueError:
        return None if word in NULL_WORDS else text


def _with_mappings(hint: Any, value: Any) -> Any:
    """An option of type `hint` from a shell, parsed if it is a mapping or a list of mappings. Lists
    of texts are not parsed: an item may be [END]."""
    kinds = kinds_of(hint)
    for kind in kinds:
        container = typing.get_origin(kind)
        if container is dict and isinstance(value, str):
            return _read(value, "{", dict)
        if container is not list or dict not in _origins(item := typing.get_args(kind)[0]):
            continue
        if isinstance(value, list):
            return [_with_mappings(item, part) for part in value]
        found = _read(value, "[", list)
        return _with_mappings(item, found) if found is value and str not in kinds else found
    return value


def _read(text: str, opening: str, container: type) -> Any:
    if not text.lstrip().startswith(opening):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = read_value(text)
    return found if isinstance(found, container) else text


def _split(arguments: list[str]) -> tuple[str | None, dict[str, Any], list[str]]:
    """The configuration file, the options by name, and the faults of a command line."""
    path: str | None = None
    given: dict[str, Any] = {}
    faults: list[str] = []
    remaining = list(arguments)
    while remaining:
        token = remaining.pop(0)
        key, equals, text = token.partition("=")
        name = _normal(key)
        if token.startswith("--") and not equals and _is_switched_off(name):
            faults += _add(given, name.removeprefix("no_"), ["false"])
            continue
        if token.startswith("--") and not _is_option(name):
            faults.append(f"unknown option --{name}{suggest_option(name, known_names())}")
            while remaining and not _starts_option(remaining[0]):
                remaining.pop(0)  # the values of the unknown option
            continue
        if not _starts_option(token):
            if is_script(token):
                refuse_foreign(token)
            faults.append(
                f"{token} is not an option; write --option value, option=value or the path of "
                f"a .yaml file{suggest(token, known_names())}"
            )
            continue
        if not (equals or token.startswith("-")):
            name, values = "config", [token]
        else:
            values = [text] if equals else _take(name, remaining)
        if name != "config":
            given_as = key.removeprefix("--").replace("-", "_")
            if retired.place_of_entry(given_as) != given_as:
                warnings.warn(f"{given_as} is retired; write {name}", FutureWarning, stacklevel=4)
            faults += _add(given, name, values)
        elif len(values) != 1:
            faults.append("--config takes one .yaml file")
        elif path is not None:
            faults.append(f"two configuration files, {path} and {values[0]}; give only one")
        else:
            path = values[0]
    return path, given, faults


def _starts_option(token: str) -> bool:
    """Whether a word of the command line is not a value of the option before it."""
    key, equals, _ = token.partition("=")
    if token.startswith("--") or (bool(equals) and _is_option(_normal(key))):
        return True
    return _is_letter(token) or token.endswith(YAML_SUFFIXES)


def _is_letter(token: str) -> bool:
    return len(token) == 2 and token[0] == "-" and token[1] in SHORT


def _add(given: dict[str, Any], name: str, values: list[str]) -> list[str]:
    """Add an option to `given`; returns the faults of the option."""
    kinds = _kinds(name)
    if not values:
        if bool not in kinds:
            return [f"--{name} needs a value"]
        values = ["true"]
    if name in given and list in kinds:
        earlier = given[name]
        values = [*(earlier if isinstance(earlier, list) else [earlier]), *values]
    given[name] = values if len(values) > 1 else values[0]
    return []


def _kinds(name: str) -> set[Any]:
    """The types of an option: bool, list, ... For a refused option, the types of its values."""
    if _is_entry(name):
        option, _, entry = name.partition(".")
        kind = key_types(option).get(entry) if option in KWARGS else None
        return {str} if kind is None else _origins(kind)
    if name in retired.NAMES:
        return _origins(retired.kind_of(name))
    if name in REFUSED:
        return {type(value) for value in REFUSED[name][0]}
    if name in WITHOUT_EFFECT:
        return {type(WITHOUT_EFFECT[name][0])}
    return _origins(option_types()[our_name(name)])


def _origins(hint: Any) -> set[Any]:
    return {typing.get_origin(kind) or kind for kind in kinds_of(hint)}


def _take(name: str, remaining: list[str]) -> list[str]:
    """Remove from `remaining`, and return, the values that belong to option `name`."""
    kinds = {str} if name == "config" else _kinds(name)
    many = list in kinds or tuple in kinds
    values: list[str] = []
    while remaining and (many or not values):
        token = remaining[0]
        # Only the first value of a path option may be a .yaml file.
        is_value = token.endswith(YAML_SUFFIXES) and not values and bool not in kinds
        if _starts_option(token) and (token.startswith("-") or not is_value):
            break
        values.append(remaining.pop(0))
    return values


def _normal(key: str) -> str:
    """The option name in `key`: without dashes, and the full name for a short name."""
    name = key.strip().removeprefix("--").replace("-", "_")
    if _is_letter(key):
        return SHORT[key[1]]
    return SHORT[name] if len(name) > 1 and name in SHORT else retired.place_of_entry(name)


def _is_switched_off(name: str) -> bool:
    """Whether `name` is `no_` followed by a switch, as in transformers' parser."""
    switch = name.removeprefix("no_")
    return name != switch and not _is_option(name) and _is_option(switch) and bool in _kinds(switch)


def _is_option(name: str) -> bool:
    return name == "config" or name in known_names() or _is_entry(name)
