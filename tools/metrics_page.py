"""Writes the tables of docs/metrics.md from `rloo.tracking.metric_registry`: `python
tools/metrics_page.py`.

The table after a line `<!-- table:NAME -->` is replaced. All other text is kept.
"""

from __future__ import annotations

import re
from pathlib import Path

from rloo.tracking.metric_registry import PARTS, Metric

PAGE = Path(__file__).resolve().parent.parent / "docs/metrics.md"
HEAD = "| name | unit | meaning | healthy | with several processes |\n|---|---|---|---|---|\n"


def filled(page: str) -> str:
    """The page with all tables rewritten."""

    def table(match: re.Match[str]) -> str:
        return match[1] + HEAD + "".join(map(_line, PARTS[match[2]]))

    return re.sub(r"(<!-- table:(\w+) -->\n\n)(?:\|.*\n)*", table, page)


def _line(row: Metric) -> str:
    meaning = f"{row.meaning} {row.note}".strip()
    healthy = str(row.band) if row.band else {"": "", "higher": "↑", "lower": "↓"}[row.better]
    return f"| `{row.name}` | {row.unit} | {meaning} | {healthy} | {row.ranks} |\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
