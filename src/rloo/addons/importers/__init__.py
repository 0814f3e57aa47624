"""Imports other systems' configurations: `rloo config --from SYSTEM`.

A setting that the source does not set has the default of the other system, not ours. Every key of
the source is converted to an option, or listed as a key without a counterpart.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rloo.addons.importers.areal import import_areal
from rloo.addons.importers.hydra import is_yaml
from rloo.addons.importers.ms_swift import import_ms_swift
from rloo.addons.importers.nemo_rl import import_nemo_rl
from rloo.addons.importers.openrlhf import import_openrlhf
from rloo.addons.importers.settings_reader import ImportResult, Unmapped, nested
from rloo.addons.importers.trl import import_trl
from rloo.addons.importers.verl import import_verl
from rloo.config.compat.aliases import resolve
from rloo.config.compat.detect_system import is_script, refuse_unconverted, system_of
from rloo.config.compat.parser_fields import option_types
from rloo.config.config import RLOOConfig
from rloo.config.fields import suggest
from rloo.config.presets import preset_options, remarks
from rloo.config.secrets import hide
from rloo.config.validation import out_of_range
from rloo.config.yaml_io import write_yaml

# Endings of the names of secret values.
_SECRET = re.compile(r"(?:api_?key|_token|secret|password|wandb\.key)$", re.IGNORECASE)
_HAS_SECRET = re.compile(r"(?:api_?key|token|secret|password)['\"]?\s*[:=]", re.IGNORECASE)
# SYSTEM of --from -> (the system's name, the function that imports a path or command line with
# overrides).
IMPORTERS: dict[str, tuple[str, Callable[[str, Sequence[str]], ImportResult]]] = {
    "areal": ("AReaL", import_areal),
    "ms-swift": ("ms-swift", import_ms_swift),
    "nemo_rl": ("NeMo-RL", import_nemo_rl),
    "openrlhf": ("OpenRLHF", import_openrlhf),
    "trl": ("TRL", import_trl),
    "verl": ("verl", import_verl),
}


def _plainly(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


# Spelling of a system's name -> its key in IMPORTERS.
_NAMED = {_plainly(word): key for key, (name, _) in IMPORTERS.items() for word in (key, name)}
_NAMED |= {"swift": "ms-swift", "nemo": "nemo_rl"}


def _key_of(system: str) -> str:
    """The key of a system in IMPORTERS for any spelling of its name; `system` itself if it is
    unknown."""
    return _NAMED.get(_plainly(system), system)


def import_config(system: str, source: str, overrides: Sequence[str] = ()) -> ImportResult:
    """Import `source`: the path of a YAML file or shell script, or a command line. `overrides` in
    the system's syntax are applied after `source`. `system` may end with a version, as in verl@0.3.
    Raises ValueError for an unreadable source, and for options that contradict each other in
    rloo."""
    system, at, version = system.partition("@")
    if at and system != "verl":
        raise ValueError(f"--from is {system}@{version}; versions are told apart for verl only")
    system = _key_of(system)
    if system not in IMPORTERS:
        raise ValueError(
            f"--from is {system!r}; it must be one of {', '.join(IMPORTERS)}"
            f"{suggest(system, IMPORTERS)}"
        )
    if re.fullmatch(r"~/\S+", source):
        source = os.path.expanduser(source)
    if os.path.isdir(source):
        raise ValueError(f"{source} is a folder; give a file, a script or a command line in quotes")
    if overrides and re.fullmatch(r"[\w./-]+", source) and not os.path.isfile(source):
        source, overrides = shlex.join([source, *overrides]), ()  # an unquoted command line
    if is_yaml(source) or is_script(source):
        refuse_unconverted(source)
    meant = system_of(source) if is_yaml(source) or is_script(source) else None
    if meant not in (None, system):
        raise ValueError(
            f"{source} is of {IMPORTERS[str(meant)][0]}, not of {IMPORTERS[system][0]}: "
            f"rloo config --from {meant} {source} > run.yaml"
        )
    read = partial(import_verl, version=version) if version else IMPORTERS[system][1]
    found = read(source, overrides)
    options = resolve(nested(found.options), option_types())
    for name in ("model", "dataset", "eval_dataset", "output_dir"):
        if str(options.get(name)).startswith("~/"):  # the shell or the other system expands ~
            options[name] = os.path.expanduser(options[name])
    # A value that is invalid in rloo must not stop the conversion of other values.
    left = [
        Unmapped(name, value, f"it {rule}; here it has its default")
        for name, value, rule in out_of_range(options)
        if _removed(options, name)
    ]
    config = RLOOConfig(**options)  # checks that they fit together
    notes = [*found.notes, *(f"{name} {value} is left out: {why}" for name, value, why in left)]
    return ImportResult(options, found.taken, [*found.left, *left], [*notes, *remarks(config)])


def _removed(options: dict[str, Any], name: str) -> bool:
    """Remove an option, or a key of a mapping (`kl_kwargs.clip`). Returns whether it was set."""
    option, dot, key = name.partition(".")
    if name in options:
        del options[name]
        return True
    if not dot or key not in (options.get(option) or {}):
        return False
    options[option] = {n: value for n, value in options[option].items() if n != key} or None
    return True


def render_imported(system: str, found: ImportResult) -> str:
    """YAML for `rloo train`: options that differ from our defaults; settings without a counterpart
    and notes are comments."""
    preset = found.options.get("preset")
    defaults = RLOOConfig().to_dict() | preset_options(preset) | {"preset": None}
    unlike = {
        name: list(value) if isinstance(value, tuple) else value
        for name in option_types()
        if name in found.options and (value := found.options[name]) != defaults[name]
    }
    name = IMPORTERS[_key_of(system.partition("@")[0])][0]
    lines = [f"# Imported from {name}. Options that are not here have the default of rloo."]
    lines += [f"# note: {_one_line(note)}" for note in found.notes]
    lines.append(write_yaml(unlike).rstrip())
    if found.left:
        lines.append(f"# Without a counterpart here, and so not taken over from {name}:")
    for reason in dict.fromkeys(left.reason for left in found.left):
        lines.append(f"# - {reason}")
        for key, value, _ in (left for left in found.left if left.reason == reason):
            secret = _SECRET.search(key) or _HAS_SECRET.search(str(value))
            hidden = "(not shown)" if secret else value
            shown = json.dumps(hidden, ensure_ascii=False, default=str)
            lines.append(f"#     {_one_line(key)}: {shown}")
    return str(hide("\n".join(lines))) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
