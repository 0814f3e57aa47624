"""Texts of `rloo config`: descriptions of options, and the resolved configuration."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import Field
from itertools import groupby
from typing import Any

from rloo.config.compat import retired
from rloo.config.compat.aliases import ALIASES, SHORT, our_name
from rloo.config.compat.retired import ELSEWHERE
from rloo.config.compat.unsupported import REFUSED, WITHOUT_EFFECT
from rloo.config.config import DEVIATIONS, RLOOConfig
from rloo.config.estimator_config import ARGUMENTS
from rloo.config.fields import TIERS, default_of
from rloo.config.kwargs_options import KWARGS, keys_of
from rloo.config.options import OPTIONS
from rloo.config.yaml_io import write_yaml

_COLUMN = 32
# Status of other systems' options -> name -> (the values to show, the reason).
_OTHERS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "Refused, except at the values shown": REFUSED,
    "Accepted without effect": {
        name: ((default,), reason) for name, (default, reason) in WITHOUT_EFFECT.items()
    },
}


def render_basic(*, elsewhere: bool = True) -> str:
    """The options that most runs set, by subject, wrapped to the terminal. `elsewhere` adds the
    names of the options in other systems."""
    basic = [field for field in OPTIONS if field.metadata["tier"] == "basic"]
    sections = _by_subject(basic, elsewhere=elsewhere)
    return (
        f"The {len(basic)} options that most runs set. `rloo config --all` lists all options,\n"
        f"`rloo config NAME` explains one option.\n\n{_titled(sections)}"
    )


def render_all() -> str:
    """All options by tier and subject, then options of other systems that are refused or have no
    effect, then retired names with their replacements."""
    parts = []
    for tier, who in TIERS.items():
        options = [option for option in OPTIONS if option.metadata["tier"] == tier]
        head = column("", f"{tier.upper()} OPTIONS ({len(options)}): {who}.", 0)
        parts.append(f"{head}\n{_titled(_by_subject(options))}")
    sections = {}
    for title, others in _OTHERS.items():
        sections[title] = "".join(
            column("-", f"{why}: {', '.join(_setting(n, *others[n][0]) for n in names)}", 2)
            for why, names in groupby(others, key=lambda name: others[name][1])
        )
    sections["Retired"] = "".join(column("-", retired.explain(n), 2) for n in retired.RETIRED)
    return "\n\n".join([*parts, _titled(sections)])


def _by_subject(options: Iterable[Field[Any]], *, elsewhere: bool = True) -> dict[str, str]:
    sections: dict[str, str] = {}
    for option in options:
        subject = option.metadata["subject"]
        sections[subject] = sections.get(subject, "") + _entry(option, elsewhere=elsewhere)
    return sections


def _titled(sections: Mapping[str, str]) -> str:
    return "\n".join(f"{title.upper()}\n\n{text}" for title, text in sections.items())


def render_option(name: str) -> str | None:
    """The description of one option, by its name here or in another system; None if unknown."""
    for title, others in _OTHERS.items():
        if name in others:
            values, why = others[name]
            return column(_setting(name, *values), f"{title}: {why}.")
    if name in retired.NAMES:
        option = retired.place_of(name).partition(".")[0]
        return column("", retired.explain(name), 0) + (render_option(option) or "")
    ours = SHORT.get(name, our_name(name))
    return next((_entry(field) for field in OPTIONS if field.name == ours), None)


def render_resolved(config: RLOOConfig) -> str:
    """`config` as YAML that `rloo train` reads back to an equal configuration."""
    return write_yaml(config.to_dict())


def _entry(field: Field[Any], *, elsewhere: bool = True) -> str:
    """The text of an option: default, help, short names, and names in other systems."""
    theirs = DEVIATIONS.get(field.name)
    unlike = f" TRL's default is {value_as_text(theirs[0])}." if theirs else ""
    short = [f"-{n}" if len(n) == 1 else f"--{n}" for n, o in SHORT.items() if o == field.name]
    brief = f" For short: {', '.join(short)}." if short else ""
    head = _setting(field.name, default_of(field))
    text = column(head, field.metadata["help"] + brief + unlike)
    keys = keys_of(field.name).values() if field.name in KWARGS else ()
    names = {", ".join(field.metadata["systems"]): ["the same"]}
    for alias, (ours, systems) in ALIASES.items():
        if ours == field.name:
            names.setdefault(systems, []).append(alias)
    for system, theirs_here in ELSEWHERE.items():
        names.setdefault(system, []).extend(n for n, o in theirs_here.items() if o == field.name)
    known = [f"{', '.join(n)} ({systems})" for systems, n in names.items() if systems and n]
    if known and elsewhere:
        text += column("", f"In other systems: {'; '.join(known)}.")
    if field.name == "estimator_kwargs":
        arguments = ", ".join(_setting(name, value) for name, value in ARGUMENTS.items())
        text += column("", f"Arguments of composed: {arguments}.")
    return text + "".join(_key_entry(field.name, key) for key in keys)


def _key_entry(option: str, key: Field[Any]) -> str:
    """The text of a mapping's key, in the form of an option, indented by two columns."""
    place = f"{option}.{key.name}"
    names = [f"{n} ({who})" for who, named in ELSEWHERE.items() for n in named if named[n] == place]
    text = key.metadata["help"] + (f" In other systems: {', '.join(names)}." if names else "")
    return column(f"  {_setting(key.name, default_of(key))}", text)


def column(head: str, text: str, indent: int = _COLUMN) -> str:
    """`text` as a column right of `head`, or below a long `head`, wrapped to the terminal."""
    if head and len(head) >= indent:
        return f"{head}\n{column('', text, indent)}"
    lines = textwrap.wrap(
        text,
        max(80, min(110, shutil.get_terminal_size((100, 24)).columns)),
        initial_indent=head.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"


def _setting(name: str, *values: Any) -> str:
    return f"{name} = {' or '.join(map(value_as_text, values))}" if values else name


def value_as_text(value: Any) -> str:
    """A value in the notation of the list of options."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'
