"""What a run's folder holds, as far as it can be read: nothing here fails because of a torn line, a
file that is missing, or one of an older version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo.config.parsing import parse_command_line

Row = Mapping[str, Any]
SUMMARY = "summary.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The rows of a run's files, its summary (empty while it has none), and its options. `alarms`
    are findings as they were told while it went on."""

    path: Path
    metrics: Sequence[Row]
    evaluations: Sequence[Row]
    completions: Sequence[Row]
    groups: Sequence[Row]
    alarms: Sequence[Row]
    summary: Row
    options: Row

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def status(self) -> str:
        """`finished`, `interrupted` or `failed`; else `not ended`, which a run is that goes on, or
        that was killed."""
        of_these_steps = self.summary.get("steps", -1) >= self.steps
        return str(self.summary.get("status")) if of_these_steps else "not ended"


def read_run(folder: Path) -> RunFolder:
    """Read a folder. Raises ValueError for one in which no run has begun."""
    summary = _object(folder / SUMMARY)
    if not any((folder / name).exists() for name in ("metrics.jsonl", "config.yaml", SUMMARY)):
        raise ValueError(
            f"{folder} holds no run: it has neither metrics.jsonl nor {SUMMARY}; name the "
            "output_dir of one"
        )
    rows = {
        name: _rows(folder / f"{name}.jsonl")
        for name in ("metrics", "evaluations", "completions", "groups", "alarms")
    }
    options = summary.get("config") or _options(folder / "config.yaml")
    return RunFolder(folder, summary=summary, options=options, **rows)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _options(path: Path) -> dict[str, Any]:
    try:
        return parse_command_line([str(path)]).to_dict() if path.exists() else {}
    except (ValueError, OSError):  # of another version; the rest of the report is worth having
        return {}
