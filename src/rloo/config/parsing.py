"""Configurations as people write them: a YAML file and a command line, the latter winning."""

from __future__ import annotations

import json
import os
import typing
from typing import Any

from rloo.config.aliases import our_name, resolve
from rloo.config.config import RLOOConfig, known_names, option_types
from rloo.config.plain_yaml import read_yaml
from rloo.config.presets import BASE
from rloo.config.reading import FALSE_WORDS, NULL_WORDS, TRUE_WORDS, kinds_of, suggest
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT

# Options whose value may be a file's function, and those that may be a file or folder.
FUNCTION_OPTIONS = ("reward", "eval_reward", "estimator")
YAML_SUFFIXES = (".yaml", ".yml")
PATH_OPTIONS = ("model", "dataset", "eval_dataset", "resume_from_checkpoint", *FUNCTION_OPTIONS)


def parse_command_line(arguments: list[str]) -> RLOOConfig:
    """`[config.yaml] [--option value | --option=value | --switch | option=value] ...`

    Dashes and underscores in option names are the same, aliases and dotted names are accepted, a
    list takes several values or the option several times, a mapping is JSON, and one entry of it
    `--mapping.name value`, beside those of the file. The command line wins over the file. Raises
    ValueError that names the option, or the file and line.
    """
    path, given = _split(arguments)
    written, lines = read_config_file(path) if path else ({}, {})
    types = option_types()
    written = {name: value for name, value in written.items() if name not in given}
    entries = {name: given.pop(name) for name in list(given) if _is_entry(name)}
    values = resolve(written, types, where=lines)
    if "preset" in given:  # a resolved file names every part of the objective
        values = {name: value for name, value in values.items() if name not in BASE}
    if path:
        values = {name: _beside(path, name, value) for name, value in values.items()}
    values |= resolve(given, types)
    for name, text in entries.items():
        option, _, entry = name.partition(".")
        values[option] = {**(values.get(option) or {}), entry: _as_value(text)}
    return RLOOConfig(**values)


def read_config_file(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What `read_yaml` does, with our options that are mappings as whole values."""
    return read_yaml(path, known_names().__contains__)


def _beside(path: str, name: str, value: Any) -> Any:
    """`value` looked for in the current folder, then in the YAML file's."""
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
    """Whether `name` is `option.entry` of an option that is a mapping."""
    option, dot, _ = name.partition(".")
    return bool(dot) and option in option_types() and dict in _kinds(option)


def _as_value(text: str) -> Any:
    """What a shell gives for an entry, whose type nothing declares: JSON where it is that."""
    try:
        word = text.lower()
        return json.loads(word if word in ("true", "false") else text)
    except ValueError:
        return None if word in NULL_WORDS else text


def _split(arguments: list[str]) -> tuple[str | None, dict[str, Any]]:
    path: str | None = None
    given: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        token = remaining.pop(0)
        key, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--") and not equals:
            if not token.endswith(YAML_SUFFIXES):
                raise ValueError(
                    f"{token} is not an option; write --option value, option=value or the path of "
                    f"a .yaml file{suggest(token, known_names())}"
                )
            if path is not None:
                raise ValueError(f"two configuration files, {path} and {token}; give only one")
            path = token
            continue
        name = _normal(key)
        if name != "config" and not _is_option(name):
            raise ValueError(f"unknown option --{name}{suggest(name, known_names())}")
        values = [text] if equals else _take(name, remaining)
        if name == "config":
            if path is not None or len(values) != 1:
                raise ValueError("--config takes one .yaml file")
            path = values[0]
        else:
            _add(given, name, values)
    return path, given


def _add(given: dict[str, Any], name: str, values: list[str]) -> None:
    kinds = _kinds(name)
    if not values:
        if bool not in kinds:
            raise ValueError(f"--{name} needs a value")
        values = ["true"]
    if name in given:
        if list not in kinds:
            raise ValueError(f"--{name} is given twice; give it once")
        earlier = given[name]
        values = [*(earlier if isinstance(earlier, list) else [earlier]), *values]
    given[name] = values if len(values) > 1 else values[0]


def _kinds(name: str) -> set[Any]:
    """The types an option takes: bool, list, ... (a refused one: that of its default)."""
    if _is_entry(name):
        return {str}
    if name in REFUSED:
        return {type(value) for value in REFUSED[name][0]}
    if name in WITHOUT_EFFECT:
        return {type(WITHOUT_EFFECT[name][0])}
    return {typing.get_origin(kind) or kind for kind in kinds_of(option_types()[our_name(name)])}


def _take(name: str, remaining: list[str]) -> list[str]:
    """Remove from `remaining`, and return, the values that belong to option `name`."""
    kinds = {str} if name == "config" else _kinds(name)
    many = list in kinds or tuple in kinds
    words = (*TRUE_WORDS, *FALSE_WORDS, *NULL_WORDS)
    values: list[str] = []
    while remaining and (many or not values):
        token = remaining[0]
        is_yaml = token.endswith(YAML_SUFFIXES)
        if token.startswith("--") or (is_yaml and (values or bool in kinds)):
            break
        if "=" in token and _is_option(_normal(token.partition("=")[0])):
            break
        if bool in kinds and str not in kinds and token.lower() not in words:
            break
        values.append(remaining.pop(0))
    return values


def _normal(key: str) -> str:
    return key.strip().removeprefix("--").replace("-", "_")


def _is_option(name: str) -> bool:
    return name in known_names() or _is_entry(name)
