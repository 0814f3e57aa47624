"""Writes a run's rows, one JSON object per line, and survives full disks and power cuts."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo.distributed.atomic_io import fsync_path
from rloo.tracking.jsonl import strict, write_text
from rloo.tracking.run_reader import row_of


class JsonlWriter:
    """Writes the files of a run that have one JSON row per line. A row that cannot be written (a
    full disk) stays in `waiting` and is written before later rows. A checkpoint must store the rows
    in `waiting`."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        self.errors: dict[str, OSError] = {}
        self._unsynced: set[str] = set()

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append one line per row. If the process is killed, at most the last line is torn."""
        self.waiting[name] += [strict(row) for row in rows]
        self.write(name)

    def write(self, name: str, *, sync: bool = False) -> None:
        """Write the waiting rows; on failure, `errors` has the reason."""
        path, rows = self.folder / name, self.waiting[name]
        if not rows and not (sync and name in self._unsynced):
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
                    os.truncate(path, whole)  # otherwise the next row would continue a torn line
                    raise
        except OSError as error:
            self.errors[name] = error
        else:
            self.waiting[name] = []
            self.errors.pop(name, None)
            if sync:
                self._unsynced.discard(name)
            else:
                self._unsynced.add(name)

    def sync(self) -> None:
        """Sync all files to disk, as far as possible, before a checkpoint that relies on their
        rows."""
        for name in self.waiting:
            self.write(name, sync=True)
        fsync_path(self.folder)

    def truncate(
        self, name: str, keep: Callable[[Mapping[str, Any]], bool]
    ) -> tuple[list[dict[str, Any]], int]:
        """Rewrite a file with the lines that `keep` accepts, unchanged, and the waiting rows.
        Unreadable lines are dropped. Returns the rows and the number of unreadable lines."""
        path, lines, unreadable = self.folder / name, [], 0
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        for line in filter(str.strip, text.split("\n")):
            row = row_of(name, line)
            unreadable += row is None
            lines += [line] if row is not None and keep(row) else []
        lines += [json.dumps(row) for row in self.waiting[name]]
        if text or lines:
            write_text(path, "".join(f"{line}\n" for line in lines))
        self.waiting[name] = []
        return [row for line in lines if (row := row_of(name, line)) is not None], unreadable
