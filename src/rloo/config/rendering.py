"""Configurations as people read them: the options in words, and the resolved configuration."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import Field
from itertools import groupby
from typing import Any

from rloo.config.aliases import ALIASES, our_name
from rloo.config.config import DEVIATIONS, RLOOConfig
from rloo.config.plain_yaml import write_yaml
from rloo.config.reading import default_of
from rloo.config.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.vllm_options import OPTIONS

_COLUMN = 32
# What becomes of other systems' options -> their names, with the values shown and the reason.
_OTHERS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "Refused, except at the values shown": REFUSED,
    "Accepted without effect": {
        name: ((default,), reason) for name, (default, reason) in WITHOUT_EFFECT.items()
    },
}


def render_basic() -> str:
    """The options that most runs set, for the width of the terminal."""
    basic = [_entry(field) for field in OPTIONS if field.metadata["basic"]]
    return (
        f"The {len(basic)} options that most runs set. `rloo config --all` lists every one by\n"
        f"subject, `rloo config NAME` explains the one that is named.\n\n{''.join(basic)}"
    )


def render_all() -> str:
    """Every option by subject; then those of other systems that are refused or idle here."""
    sections: dict[str, str] = {}
    for field in OPTIONS:
        subject = field.metadata["subject"]
        sections[subject] = sections.get(subject, "") + _entry(field)
    for title, others in _OTHERS.items():
        sections[title] = "".join(
            _wrapped("-", f"{why}: {', '.join(_setting(n, *others[n][0]) for n in names)}", 2)
            for why, names in groupby(others, key=lambda name: others[name][1])
        )
    return "\n".join(f"{title.upper()}\n\n{text}" for title, text in sections.items())


def render_option(name: str) -> str | None:
    """One option, by the name that it has here or elsewhere; None for an unknown one."""
    for title, others in _OTHERS.items():
        if name in others:
            values, why = others[name]
            return _wrapped(_setting(name, *values), f"{title}: {why}.")
    ours = our_name(name)
    return next((_entry(field) for field in OPTIONS if field.name == ours), None)


def render_resolved(config: RLOOConfig) -> str:
    """`config` as YAML that `rloo train` reads back to an equal configuration."""
    return write_yaml(config.to_dict())


def _entry(field: Field[Any]) -> str:
    """An option, its default and meaning, and its names in other systems."""
    theirs = DEVIATIONS.get(field.name)
    unlike = f" TRL's default is {value_as_text(theirs[0])}." if theirs else ""
    text = _wrapped(_setting(field.name, default_of(field)), field.metadata["help"] + unlike)
    names = {", ".join(field.metadata["systems"]): ["the same"]}
    for alias, (ours, systems) in ALIASES.items():
        if ours == field.name:
            names.setdefault(systems, []).append(alias)
    known = [f"{', '.join(n)} ({systems})" for systems, n in names.items() if systems]
    return text + (_wrapped("", f"Elsewhere: {'; '.join(known)}.") if known else "")


def _wrapped(head: str, text: str, column: int = _COLUMN) -> str:
    """`text` in a column of its own, beside `head` or, where that is long, below it."""
    if len(head) >= column:
        return f"{head}\n{_wrapped('', text, column)}"
    lines = textwrap.wrap(
        text,
        max(80, min(110, shutil.get_terminal_size((100, 24)).columns)),
        initial_indent=head.ljust(column),
        subsequent_indent=" " * column,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def _setting(name: str, *values: Any) -> str:
    return f"{name} = {' or '.join(map(value_as_text, values))}" if values else name


def value_as_text(value: Any) -> str:
    """A value as the list of options shows it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'
