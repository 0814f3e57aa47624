"""What mkdocs.yml does to the pages: the options are written from the code, and what lies outside
of docs/ is named rather than linked."""

from __future__ import annotations

import re
from html import escape
from itertools import groupby

from rloo.config.reading import default_of
from rloo.config.rendering import value_as_text
from rloo.config.vllm_options import OPTIONS

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?:\.\./)?(?!how-to|reference)[^)]*\)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """mkdocs' event for each page, before it is rendered."""
    if page.file.src_uri == "reference/options.md":
        return markdown.replace("<!-- options -->", _options())
    leads_out = page.file.src_uri.count("/") == 0
    return _OUTSIDE.sub(r"\1", markdown) if leads_out else markdown


def _options() -> str:
    parts = []
    for subject, of_subject in groupby(OPTIONS, lambda each: each.metadata["subject"]):
        parts.append(f"## {subject}\n\n| option | default | meaning |\n|---|---|---|")
        for field in of_subject:
            default = escape(value_as_text(default_of(field)))
            parts.append(f"| `{field.name}` | <code>{default}</code> | {field.metadata['help']} |")
        parts.append("")
    return "\n".join(parts)
