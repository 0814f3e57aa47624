"""Strict JSON files for other programs: one row per line, never half a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def strict(value: Any) -> Any:
    """`value` in JSON types: non-finite numbers become None, unknown objects their text."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return str(value)


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append one line per row; a kill leaves at most one torn line, at the end."""
    lines = [json.dumps(strict(row), allow_nan=False) + "\n" for row in rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def truncate_rows(path: Path, step: int) -> tuple[list[dict[str, Any]], int]:
    """Drop rows after `step` and unreadable lines; return the rows kept, and how many lines."""
    if not path.exists():
        return [], 0
    rows, unreadable = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            unreadable += 1
    kept = [row for row in rows if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept, unreadable


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, indented and atomically."""
    write_text(path, json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: even after a kill it is either the old or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
