"""The file itself: data, style and script in one, which no text of a run can break out of."""

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
    """What the page shows of these runs. No text in it has a character that controls anything."""
    found: dict[str, Any] = _inert(strict(content([read_begun(folder) for folder in folders])))
    return found


def _inert(value: Any) -> Any:
    if isinstance(value, dict):
        return {inert(name): _inert(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_inert(item) for item in value]
    return inert(value) if isinstance(value, str) else value


def document(data: dict[str, Any], *, follows: bool = False) -> str:
    """The page. Its policy allows its own script and style, by their hashes, and nothing else; one
    that `follows` a run also asks the server that it came from for new data."""
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
    """JSON in which nothing can end the element that it stands in: ASCII without `<`, `>`, `&`."""
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
