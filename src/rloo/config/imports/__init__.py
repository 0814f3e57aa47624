"""Other systems' configurations as ours: `rloo config --from areal | ms-swift | trl`.

What a file or command line leaves out has that system's default, which is not ours. Every key ends
up in an option, or in the list of those without a counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from rloo.config.aliases import resolve
from rloo.config.config import RLOOConfig, option_types
from rloo.config.imports.areal import import_areal
from rloo.config.imports.ms_swift import import_ms_swift
from rloo.config.imports.source import Imported
from rloo.config.imports.trl import import_trl
from rloo.config.plain_yaml import write_yaml
from rloo.config.presets import preset_options, remarks
from rloo.config.reading import suggest

# What --from takes -> (the system's name, what reads it: from a path, or a command line).
IMPORTERS: dict[str, tuple[str, Callable[[str], Imported]]] = {
    "areal": ("AReaL", import_areal),
    "ms-swift": ("ms-swift", import_ms_swift),
    "trl": ("TRL", import_trl),
}


def import_config(system: str, source: str) -> Imported:
    """Read `source`: the path of a YAML file; for ms-swift a command line, or a script's path.
    Raises ValueError for what cannot be read, and a result that contradicts itself here."""
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
    """YAML that `rloo train` reads: the options unlike our defaults, and as comments the rest."""
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
        for key, value, _ in (left for left in found.left if left.reason == reason):
            shown = json.dumps(value, ensure_ascii=False, default=str)
            lines.append(f"#     {_one_line(key)}: {shown}")
    return "\n".join(lines) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())
