"""Strict JSON files for other programs: one row per line, never half a file."""

from __future__ import annotations

import errno
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rloo import __version__
from rloo.dist.folders import sync

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
GROUPS = "groups.jsonl"
ALARMS = "alarms.jsonl"
SUMMARY = "summary.json"
# What the starting policy said on evaluation prompts, where something is to compare with it.
START = "start_completions.json"
# The folder of what processes other than the main one print.
LOGS = "logs"


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


class Journal:
    """A run's files of one JSON row per line. A row that cannot be written now (a full disk) waits,
    in its place, and is written with the next one; what still waits belongs into a checkpoint."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.errors: dict[str, OSError] = {}

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per row; a kill leaves at most one torn line, at the end."""
        self.waiting[name] += [strict(row) for row in rows]
        self.write(name)

    def write(self, name: str, *, sync: bool = False) -> None:
        """Write what waits; in `errors` stands why that is impossible."""
        path, rows = self.folder / name, self.waiting[name]
        if not rows and not (sync and path.exists()):
            return
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        try:
            with path.open("ab", buffering=0) as file:
                whole = file.tell()
                try:
                    if file.write(lines) != len(lines):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                    if sync:
                        os.fsync(file.fileno())
                except OSError:
                    os.truncate(path, whole)  # or the next row would continue a torn line
                    raise
        except OSError as error:
            self.errors[name] = error
        else:
            self.waiting[name] = []
            self.errors.pop(name, None)

    def sync(self) -> None:
        """Have everything on the disk, as far as it takes it, before a checkpoint counts it."""
        for name in self.waiting:
            self.write(name, sync=True)
        sync(self.folder)

    def truncate(self, name: str, keep: Callable[[Any], bool]) -> tuple[list[Any], int]:
        """Rewrite a file with the rows to keep and those that wait, without unreadable lines.
        Returns the rows and the number of unreadable lines."""
        path, rows, unreadable = self.folder / name, [], 0
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                rows += [row] if keep(row) else []
            except (ValueError, TypeError, KeyError):
                unreadable += 1
        kept = rows + self.waiting[name]
        if text or kept:
            write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.waiting[name] = []
        return kept, unreadable


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, indented and atomically."""
    write_text(path, json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: even after a power cut it is either the old one, or, once this has
    returned, the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def versions() -> dict[str, str]:
    """The versions of the libraries that determine a result."""
    libraries = {name: _installed(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **libraries, "rloo": __version__}


@cache
def _installed(name: str) -> str:
    return version(name)  # reads and parses a file
