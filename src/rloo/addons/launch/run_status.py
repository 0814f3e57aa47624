"""`rloo status` and `rloo stop`: show or stop a run through the files in its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo.tracking.json_values import count, record, several, text
from rloo.tracking.jsonl import EVENTS, LOGS, METRICS
from rloo.tracking.progress_line import progress_line
from rloo.tracking.run_reader import (
    NOT_ENDED,
    Row,
    read_folder,
    read_object,
    read_rows,
    read_summary,
)
from rloo.trainer.heartbeat import MEMBERS, STOP
from rloo.trainer.run_lock import lives

_RECENT = 8
_member = record({"role": text, "host": text, "pid": count}, {"number": count})
_members = several(_member)
_MEMBERS = record(known={"max_steps": count, "ranks": _members, "workers": _members})
_SHOWN_FAILURES = 5
# Seconds for a run to save after a stop request; the run checks for a request every second.
STOP_SECONDS = 1800.0


def status(folder: Path) -> Iterator[str]:
    """Lines about the run in a folder: its state, its processes, and its last failures. Raises
    ValueError if there is no run."""
    found, going_on = read_folder(folder), lives(folder)
    rows, faults = found.metrics, [*found.faults]
    members = read_object(folder / MEMBERS, _MEMBERS)
    if not rows and not members and not found.summary and not going_on:
        raise ValueError(f"{folder} has no run (no {METRICS}, and nobody is at work there)")
    state = "has died" if found.status == NOT_ENDED else found.status
    most = members.get("max_steps") or found.summary.get("max_steps")
    of = f" of {most}" if most else ""
    yield f"{folder}: {'is going on' if going_on else state}, step {found.steps}{of}"
    if rows:
        scored = [row for row in rows if math.isfinite(row.get("reward", math.nan))]
        planned = max(most or 0, found.steps)
        waiting = 1.0 if going_on else None
        recent = rows[-_RECENT:]
        shown = progress_line(found.steps, planned, scored=scored, recent=recent, waiting=waiting)
        yield shown.line()
    if found.status == NOT_ENDED and not going_on:
        yield "resume it: the command of the run, with --resume_from_checkpoint auto"
    for member in [*members.get("ranks", []), *members.get("workers", [])] if going_on else []:
        number = f" {member['number']}" if "number" in member else ""
        yield f"up: {member['role']}{number} on {member['host']}, process {member['pid']}"
    yield from _failures(folder, rows, faults)
    yield from (f"note: {fault}" for fault in faults)


def stop(folder: Path, *, seconds: float = STOP_SECONDS) -> Iterator[str]:
    """Make all processes of the run in a folder save and end, and wait until the run has ended.
    Raises ValueError if no run is active, TimeoutError if the run is still active after
    `seconds`."""
    if not lives(folder):
        raise ValueError(f"no run is going on in {folder}")
    (folder / STOP).touch()
    yield f"{folder}: asked to save and stop"
    deadline = time.monotonic() + seconds
    while lives(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run in {folder} has not ended within {seconds:g} s")
        time.sleep(1.0)
    yield f"{folder}: {read_summary(folder).get('status', 'has ended without a summary')}"


def _failures(folder: Path, rows: Sequence[Row], faults: list[str]) -> Iterator[str]:
    for name in ("engine/lost", "scorers/lost"):
        if rows and (lost := rows[-1].get(name, 0.0)) > 0:
            yield f"lost so far: {lost:g} ({name})"
    events = read_rows(folder / LOGS / EVENTS, faults)
    ended = [row for row in events if row["event"] == "ended" and row.get("status")]
    for row in ended[-_SHOWN_FAILURES:]:
        when = time.strftime("%H:%M:%S", time.localtime(row["time"]))
        who = f"{row['role']} {row['number']} on {row['host']}"
        log = folder / LOGS / f"{row['role']}-{row['number']}.log"
        yield f"{when}: {who} ended with {row['status']} ({log})"
