"""The HTML file: data, style and script in one, safe from markup in a run's texts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rloo.addons.report.html.content import content
from rloo.distributed.standard_streams import inert
from rloo.tracking.jsonl import strict, write_text
from rloo.tracking.run_reader import read_begun

SCRIPTS = ("dom.js", "chart.js", "samples.js", "page.js")
STYLE = "page.css"


def write_page(folders: Sequence[Path], path: Path) -> Path:
    """Write the report of one or several runs. Raises ValueError for a folder without a run."""
    write_text(path, document(data_of(folders)))
    return path


def data_of(folders: Sequence[Path]) -> dict[str, Any]:
    """The page's data for these runs, without control characters in its texts."""
    found: dict[str, Any] = _inert(strict(content([read_begun(folder) for folder in folders])))
    return found


def _inert(value: Any) -> Any:
    if isinstance(value, dict):
        return {inert(name): _inert(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    return inert(value) if isinstance(value, str) else value


def document(data: dict[str, Any], *, follows: bool = False) -> str:
    """The HTML page. Its content security policy allows only the page's script and style, by hash.
    A page that `follows` a run may also fetch data from its server."""
    script, style = _template(*SCRIPTS), _template(STYLE)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"{'connect-src ' + chr(39) + 'self' + chr(39) + '; ' if follows else ''}"
        "base-uri 'none'; form-action 'none'"
    )
    names = ", ".join(run["name"] for run in data["runs"])
    said = "".join(
        f"<p>{html.escape(run['name'])}: {html.escape(' '.join(run['verdict']))}</p>"
        for run in data["runs"]
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{html.escape(names)} · rloo</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the verdict</a>
<noscript>{said}<p>Charts and samples are drawn by this file's own script.</p></noscript>
<div id="page"></div>
<script type="application/json" id="data">{embedded(data | {"follows": follows})}</script>
<script>{script}</script>
</body>
</html>
"""


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII without `<`, `>` and `&`, so that no text ends the
    element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _template(*names: str) -> str:
    folder = files("rloo.addons.report.html")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
