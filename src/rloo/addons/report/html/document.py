"""The HTML file: data, style and script in one, safe from markup in a run's texts."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rloo.addons.report.html.completion_records import completion_records
from rloo.addons.report.html.content import content
from rloo.addons.report.html.json_text import embedded, without_controls
from rloo.tracking.jsonl import strict, write_text
from rloo.tracking.run_reader import read_begun

# A page with all completions is at most this large. `PAGE_BYTES` is room for script and style.
MOST_BYTES, PAGE_BYTES = 50_000_000, 100_000
SCRIPTS = (
    "dom.js", "axis.js", "export.js", "frame.js", "chart.js", "heat.js", "samples.js", "search.js",
    "completions.js", "compare.js", "spent.js", "page.js",
)  # fmt: skip
STYLE = "page.css"


def write_page(folders: Sequence[Path], path: Path, most_bytes: int = MOST_BYTES) -> Path:
    """Write the report of one or several runs, of at most about `most_bytes`. Raises ValueError for
    a folder without a run."""
    write_text(path, document(data_of(folders, most_bytes)))
    return path


def data_of(folders: Sequence[Path], most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The page's data for these runs, without control characters in its texts. Completions are left
    out if the data is larger than `most_bytes` as JSON (see `completion_records`)."""
    runs = [read_begun(folder) for folder in folders]
    found: dict[str, Any] = without_controls(strict(content(runs)))
    left = most_bytes - len(embedded(found)) - PAGE_BYTES
    return found | {"log": completion_records(runs, max(left, 0))}


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


@cache
def _template(*names: str) -> str:
    folder = files("rloo.addons.report.html")
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
