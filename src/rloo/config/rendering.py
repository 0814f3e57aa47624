"""Configurations as people read them: the table of options and the resolved configuration."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from rloo.config.aliases import ALIASES
from rloo.config.config import DEVIATIONS, RLOOConfig
from rloo.config.plain_yaml import write_yaml
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT

SYSTEMS = ("TRL", "AReaL", "ms-swift", "Unsloth")


def names_elsewhere(field: Field[Any]) -> dict[str, list[str]]:
    """The names of an option in each of `SYSTEMS`; those of yet others under `other`."""
    names: dict[str, list[str]] = {system: [] for system in (*SYSTEMS, "other")}
    if field.metadata["trl"]:
        names["TRL"].append(field.name)
        names["Unsloth"].append(field.name)
    if field.metadata["ms_swift"]:
        names["ms-swift"].append(field.name)
    for alias, (ours, origin) in ALIASES.items():
        if ours == field.name:
            systems = [system for system in SYSTEMS if system in origin]
            for system in systems or ["other"]:
                names[system].append(alias)
    return names


def default_of(field: Field[Any]) -> Any:
    """The default as the user sees it, before anything follows from it."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def render_options() -> str:
    """A Markdown table of every option, then one of the options refused here, with the reason."""
    lines = [_row("option", "default", "meaning", *SYSTEMS), _row(*["---"] * 7)]
    for field in fields(RLOOConfig):
        names = names_elsewhere(field)
        default = f"`{_value(default_of(field))}`"
        if field.name in DEVIATIONS:
            default += f" (TRL: {_value(DEVIATIONS[field.name][0])})"
        help = field.metadata["help"]
        if names["other"]:
            help += f" Also {', '.join(f'`{name}`' for name in names['other'])}."
        cells = [", ".join(f"`{name}`" for name in names[system]) for system in SYSTEMS]
        lines.append(_row(f"`{field.name}`", default, help, *cells))
    lines += ["", _row("not in this version", "accepted", "reason"), _row(*["---"] * 3)]
    for name, (accepted, reason) in REFUSED.items():
        values = ", ".join(f"`{_value(value)}`" for value in accepted)
        lines.append(_row(f"`{name}`", values, reason))
    for name, (default, reason) in WITHOUT_EFFECT.items():
        lines.append(_row(f"`{name}`", f"any (`{_value(default)}`)", f"no effect: {reason}"))
    return "\n".join(lines) + "\n"


def render_resolved(config: RLOOConfig) -> str:
    """`config` as YAML that `rloo train` reads back to an equal configuration."""
    return write_yaml(config.to_dict())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
