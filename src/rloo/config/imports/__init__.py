"""Other systems' configurations as ours: `rloo config --from areal | ms-swift | trl`.

What a file or command line leaves out has that system's default, which is not ours. Every key ends
up in an option, or in the list of those without a counterpart. Only reads text: neither torch nor
the other system is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rloo.config.aliases import resolve
from rloo.config.config import RLOOConfig, option_types
from rloo.config.imports.areal import import_areal
from rloo.config.imports.ms_swift import import_ms_swift
from rloo.config.imports.source import Imported, Left
from rloo.config.imports.trl import import_trl
from rloo.config.plain_yaml import write_yaml
from rloo.config.presets import preset_options, remarks
from rloo.config.reading import suggest

__all__ = ["IMPORTERS", "Imported", "Left", "import_config", "render_imported"]

# What --from takes -> (the system's name, what reads it: from a path, or a command line).
IMPORTERS: dict[str, tuple[str, Callable[[str], Imported]]] = {
    "areal": ("AReaL", import_areal),
    "ms-swift": ("ms-swift", import_ms_swift),
    "trl": ("TRL", import_trl),
}


def import_config(system: str, source: str) -> Imported:
    """Read `source`: the path of a YAML file; for ms-swift a command line, or a script's path.

    Raises ValueError for an unknown system, a source that cannot be read, values of a wrong type,
    and a result that contradicts itself here.
    """
    if system not in IMPORTERS:
        raise ValueError(
            f"--from is {system!r}; it must be one of {', '.join(IMPORTERS)}"
            f"{suggest(system, IMPORTERS)}"
        )
    found = IMPORTERS[system][1](source)
    options = resolve(found.options, option_types())
    config = RLOOConfig(**options)  # whether they fit together
    notes = [*found.notes, *remarks(config)]
    return Imported(options, found.taken, found.left, notes)


def render_imported(system: str, found: Imported) -> str:
    """YAML that `rloo train` reads: the options unlike our defaults, in our order, then as comments
    the notes and every setting that has no counterpart."""
    preset = found.options.get("preset")
    defaults = RLOOConfig().to_dict() | preset_options(preset) | {"preset": None}
    unlike = {
        name: list(value) if isinstance(value, tuple) else value
        for name in option_types()
        if name in found.options and (value := found.options[name]) != defaults[name]
    }
    name = IMPORTERS[system][0]
    lines = [f"# Imported from {name}. Options that are not here have the default of rloo."]
    lines += [f"# note: {_one_line(note)}" for note in found.notes]
    lines.append(write_yaml(unlike).rstrip())
    if found.left:
        lines.append(f"# Without a counterpart here, and so not taken over from {name}:")
    for reason in dict.fromkeys(left.reason for left in found.left):
        lines.append(f"# - {reason}")
        same = [left for left in found.left if left.reason == reason]
        lines += [f"#     {_one_line(left.key)}: {_show(left.value)}" for left in same]
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _one_line(text: str) -> str:
    return " ".join(text.split())
