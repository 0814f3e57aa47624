"""`rloo status` and `rloo stop`: where a run stands, and its end, by the files of its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo.launch.keeper import EVENTS
from rloo.report.doctor.folder import rows_of
from rloo.report.figures import figures
from rloo.report.records import LOGS, METRICS, SUMMARY
from rloo.run.lock import lives
from rloo.run.presence import MEMBERS, STOP

_RECENT = 8
_SHOWN_FAILURES = 5
# A run has so long to save when it is asked to stop, and looks for that every second.
STOP_SECONDS = 1800.0


def status(folder: Path) -> Iterator[str]:
    """Where the run in a folder stands, who takes part, and what was lost last. Raises ValueError
    where there is none."""
    rows = list(rows_of(folder / METRICS))
    summary, going_on = _read(folder / SUMMARY), lives(folder)
    known = _read(folder / MEMBERS) or summary
    if not rows and not known and not going_on:
        raise ValueError(f"{folder} has no run (no {METRICS}, and nobody is at work there)")
    state = "is going on" if going_on else summary.get("status", "has died")
    step = rows[-1]["step"] if rows else 0
    yield f"{folder}: {state}, step {step}" + (f" of {known['max_steps']}" if known else "")
    if rows:
        scored = [row for row in rows if row.get("reward") is not None]
        last = known.get("max_steps", step) if going_on else step
        yield figures(step, last, scored=scored, recent=rows[-_RECENT:]).line()
    for member in [*known.get("ranks", []), *known.get("workers", [])] if going_on else []:
        number = f" {member['number']}" if "number" in member else ""
        yield f"up: {member['role']}{number} on {member['host']}, process {member['pid']}"
    yield from _failures(folder, rows)


def stop(folder: Path, *, seconds: float = STOP_SECONDS) -> Iterator[str]:
    """Have the run in a folder save and end everywhere; waits for that. Raises ValueError where
    none is going on, TimeoutError where it has not ended after so many seconds."""
    if not lives(folder):
        raise ValueError(f"no run is going on in {folder}")
    (folder / STOP).touch()
    yield f"{folder}: asked to save and stop"
    deadline = time.monotonic() + seconds
    while lives(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run in {folder} has not ended within {seconds:g} s")
        time.sleep(1.0)
    yield f"{folder}: {_read(folder / SUMMARY).get('status', 'has ended without a summary')}"


def _failures(folder: Path, rows: list[dict[str, Any]]) -> Iterator[str]:
    for name in ("engine/lost", "scorers/lost"):
        if rows and (count := rows[-1].get(name)):
            yield f"lost so far: {count:g} ({name})"
    ended = [
        row for row in rows_of(folder / LOGS / EVENTS) if row["event"] == "ended" and row["status"]
    ]
    for row in ended[-_SHOWN_FAILURES:]:
        when = time.strftime("%H:%M:%S", time.localtime(row["time"]))
        who = f"{row['role']} {row['number']} on {row['host']}"
        log = folder / LOGS / f"{row['role']}-{row['number']}.log"
        yield f"{when}: {who} ended with {row['status']} ({log})"


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
