"""The hook of mkdocs.yml that changes the pages: it writes the options from the code, typesets
formulas, and replaces links to files outside of docs/ by names."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from rloo.config.compat import retired
from rloo.config.fields import TIERS, default_of
from rloo.config.kwargs_options import KWARGS, keys_of
from rloo.config.options import OPTIONS
from rloo.config.show import value_as_text

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?:\.\./)?(?!how-to|reference)[^)]*\)")

# Code, which is unchanged, or a formula.
_FORMULA = re.compile(r"```.*?```|`[^`\n]+`|\$(?=\S)([^$`\n]+)(?<=\S)\$", re.DOTALL)


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs' event for each page, before it is rendered."""
    if page.file.src_uri == "reference/options.md":
        return markdown.replace("<!-- options -->", _options())
    markdown = _typeset(markdown)
    leads_out = page.file.src_uri.count("/") == 0
    return _OUTSIDE.sub(r"\1", markdown) if leads_out else markdown


def _typeset(markdown: str) -> str:
    """Convert formulas (`$...$`, as on GitHub) to MathML, which browsers render. Dollars in code
    are unchanged."""
    from latex2mathml.converter import convert

    def drawn(found: re.Match) -> str:
        return found[0] if found[1] is None else convert(found[1])

    return _FORMULA.sub(drawn, markdown)


def _options() -> str:
    """The options: a section per tier, with a table per subject. A mapping is followed by its
    keys."""
    parts = []
    for tier, who in TIERS.items():
        parts.append(f"## {tier.capitalize()} options\n\nThe tier {tier}: {who}.\n")
        by_subject: dict[str, list] = {}
        for field in OPTIONS:  # options of a subject are not consecutive
            if field.metadata["tier"] == tier:
                by_subject.setdefault(field.metadata["subject"], []).append(field)
        for subject, of_subject in by_subject.items():
            parts.append(f"### {subject}\n\n| option | default | meaning |\n|---|---|---|")
            for field in of_subject:
                parts.append(_row(field.name, field))
                keys = keys_of(field.name) if field.name in KWARGS else {}
                parts += [_row(f"{field.name}.{name}", key) for name, key in keys.items()]
            parts.append("")
    parts.append(
        "## Retired options\n\nThey are read for one release, with a warning that says what to "
        "write.\n\n| option | now |\n|---|---|"
    )
    parts += [f"| `{name}` | {_now(name)} |" for name in retired.RETIRED]
    return "\n".join(parts)


def _now(name: str) -> str:
    place = retired.place_of(name)
    return f"`{place}`" if place else escape(retired.explain(name))


def _row(name: str, field: Any) -> str:
    default = escape(value_as_text(default_of(field)))
    return f"| `{name}` | <code>{default}</code> | {field.metadata['help']} |"
