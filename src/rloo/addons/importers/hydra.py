"""Composes configurations as hydra and OmegaConf do: a YAML file, the files in its `defaults`, and
`key=value` overrides of a command line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo.config.parsing import YAML_SUFFIXES
from rloo.config.yaml_io import read_value, read_yaml

# OmegaConf's mark of a missing value.
_MISSING = "???"
_WHOLE = ("chat_template_kwargs", "apply_chat_template_kwargs")


def _is_whole(name: str) -> bool:
    """Whether the mapping `name` is treated as a single value."""
    return name.rpartition(".")[2] in _WHOLE


def is_yaml(word: str) -> bool:
    """Whether `word` is the path of a YAML file."""
    return word.endswith(YAML_SUFFIXES) and "=" not in word


def read_overrides(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Parse a command line. Returns three parts: the settings written as `[+[+]]key=value`,
    `--section.key value` or `~key` (value None); the values of flags `--name value`; the other
    words."""
    values: dict[str, Any] = {}
    flags: dict[str, str] = {}
    others: list[str] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            if not equals:
                text = waiting.pop(0) if waiting and _is_value(waiting[0]) else "true"
            if "." in name:
                values[name[2:]] = _value(text)
            else:
                flags[name[2:].replace("-", "_")] = text
        elif equals and name:
            values[name.lstrip("+")] = _value(text)
        elif word.startswith("~"):
            values[word[1:]] = None
        else:
            others.append(word)
    return values, flags, others


def _is_value(word: str) -> bool:
    """Whether a word after a flag is the value of the flag, in contrast to a setting."""
    return not word.startswith("--") and not re.match(r"[+~]*[A-Za-z_][\w.@/]*=", word)


def _value(text: str) -> Any:
    stripped = text.strip()
    if stripped[:1] in ("[", "{", "'", '"') or stripped.lower() in ("null", "none"):
        return None if stripped.lower() == "none" else read_value(stripped)
    return text


def over(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """`values` by dotted names, overridden by `later`. If `later` sets a key to null or a plain
    value, all keys below that key are removed. An empty mapping changes nothing."""
    result = dict(values)
    for key, value in later.items():
        section, _, name = key.rpartition(".")
        if _is_whole(section):
            text = read_value(value) if isinstance(value, str) else value
            result[section] = {**(result.get(section) or {}), name: text}
            continue
        below = [name for name in result if name.startswith(f"{key}.")]
        if below and value == {}:
            continue
        for name in below if not isinstance(value, dict) else ():
            del result[name]
        parents = key.split(".")[:-1]
        for depth in range(1, len(parents) + 1):
            if (above := ".".join(parents[:depth])) in result:
                del result[above]
        result[key] = value
    return result


def _part(entry: Any) -> tuple[str, str]:
    """(file, section that the file configures) of an entry in hydra's `defaults`."""
    if not isinstance(entry, dict) or len(entry) != 1:
        return str(entry), ""
    group, name = next(iter(entry.items()))
    group, _, section = (
        str(group).removeprefix("override ").removeprefix("optional ").partition("@")
    )
    section = section or group.replace("/", ".")
    return f"{group}/{name}", "" if section == "_global_" else section


def _located(name: str, path: str, places: Sequence[str]) -> Path | None:
    """The file `name` in the folder of `path`, or in hydra's search path: `places` below the
    current folder or below a folder that contains the file `path`. None if it does not exist."""
    file = name if is_yaml(name) else f"{name}.yaml"
    above = [Path(), *Path(path).resolve().parents]
    folders = [Path(path).parent, *(folder / place for place in places for folder in above)]
    return next((found for f in folders if (found := f / file).is_file()), None)


def read_composed(
    path: str, seen: tuple[str, ...] = (), places: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a YAML file, merged over the values of the files in its `defaults`, and
    the names of the files in `defaults` that are missing. Files are also searched in the folders
    `places`. Raises ValueError for an unreadable file, and for a file whose `defaults` include the
    file itself."""
    real = os.path.realpath(path)
    if real in seen:
        raise ValueError(f"{path} is built on itself (defaults)")
    own, _ = read_yaml(path, _is_whole)
    own = {key: value for key, value in own.items() if value != _MISSING}
    given = own.pop("defaults", None)
    found = own.get("hydra.searchpath")
    named = [str(f).removeprefix("file://") for f in found] if isinstance(found, list) else []
    places = [*places, *named]
    values: dict[str, Any] = {}
    missing: list[str] = []
    for entry in given if isinstance(given, list) else [given] if given else []:
        name, section = _part(entry)
        if name == "_self_":
            continue
        below = _located(name, path, places)
        if below is None:
            missing.append(name)
            continue
        further, gone = read_composed(str(below), (*seen, real), places)
        under = {f"{section}.{key}": v for key, v in further.items()} if section else further
        values, missing = over(values, under), missing + gone
    replaced = [key.removesuffix("._override_") for key in own if key.endswith("._override_")]
    for section in replaced:
        del own[f"{section}._override_"]
        values = {k: v for k, v in values.items() if not f"{k}.".startswith(f"{section}.")}
    return over(values, own), missing
