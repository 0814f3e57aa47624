"""Reads a run's folder. Only this module parses a run's files.

No function fails because of a torn line, or a file that is missing, of an older version, or written
by hand. A row contains the valid entries of its line; other entries are left out. `faults` lists
unreadable lines and files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rloo.config.compat.parser_fields import option_types
from rloo.config.fields import coerce
from rloo.config.parsing import parse_command_line
from rloo.distributed.standard_streams import counted
from rloo.tracking.finding import Finding
from rloo.tracking.json_values import (
    Take,
    UnfitValue,
    anything,
    count,
    label,
    number,
    number_or_nan,
    number_or_none,
    one_of,
    record,
    several,
    switch,
    text,
)
from rloo.tracking.jsonl import (
    ALARMS,
    COMPLETIONS,
    CONFIG,
    EVALUATIONS,
    EVENTS,
    FACTS,
    GROUPS,
    HISTOGRAMS,
    METRICS,
    SUMMARY,
    strict,
)

Row = Mapping[str, Any]
# `RunFolder.status` of a run that has not ended: it is still running, or was killed.
NOT_ENDED = "not ended"
KNOWN_AT_START = ("named", "versions", "host", "git")


def _finding(value: Any) -> dict[str, Any]:
    """All fields of a Finding; only its name is required."""
    kinds = {"examples": several(text), "voids": switch, "options": record()}
    takes = {field.name: kinds.get(field.name, text) for field in fields(Finding)}
    taken = record({"name": text}, takes)(value)
    empty = dict.fromkeys(takes, "") | {"examples": [], "voids": False, "options": {}}
    return {name: taken.get(name, empty[name]) for name in takes}


def _measured(value: Any) -> dict[str, Any]:
    """The metrics and the intervals (pairs) of an evaluation, without nulls."""
    takes: dict[str, Take] = {"name": text, "dataset": text, "reward_kind": text, "step": count}
    pair = several(number, 2)
    given = record()(value)
    takes |= {name: pair for name in given if name.endswith("_interval")}
    return record(known=takes, others=number)(given)


def _moment(value: Any) -> int | float:
    """Seconds since 1970, within the range of calendar functions."""
    if not 0 <= number(value) < 2**37:
        raise UnfitValue
    return value


_part = record(known={"text": text, "type": text})
_call = record(known={"function": record(known={"name": text})})
_message = record(
    known={
        "role": text,
        "content": one_of(text, several(_part)),
        "tool_calls": several(_call),
    }
)
_content = one_of(text, several(_message))
_numbers = several(number_or_none)


def _bin(value: Any) -> list[float]:
    """The lowest and the highest value of a bin, and the number of values in it."""
    low, high, size = several(number, 3)(value)
    if not (low <= high and size >= 0):
        raise UnfitValue
    return [low, high, size]


_SAMPLE: dict[str, Take] = {
    "completion": _content,
    "prompt": _content,
    "prompt_id": label,
    "reward": number_or_none,
    "scores": record(others=number_or_none),
    "finish": text,
    "num_tokens": count,
    "advantage": one_of(number_or_none, _numbers),
    "mismatch": _numbers,
    "tokens": several(text),
    "trained": _numbers,
    "episode": record(
        {"turns": count},
        {"calls": count, "errors": count, "seconds": number, "failed": text, "start": text},
    ),
}
_side = record({"reward": several(number_or_none, 2)}, others=number_or_none)
_training = record(
    {"num_steps": count, "start": _side, "end": _side},
    {"by_reward": record(others=several(number_or_none, 3))},
)
_SUMMARY = record(
    known={
        "status": text,
        "steps": count,
        "max_steps": count,
        "start": _measured,
        "end": _measured,
        "wall_seconds": number,
        "longest_completion": count,
        "num_tokens": number,
        "refused_steps": count,
        "peak_resident_bytes": number,
        "peak_device_bytes": number,
        "notes": several(text),
        "training": _training,
        "findings": several(_finding),
        "verdict": text,
        "config": record(),
        "named": several(text),
        "totals": record(others=number),
        "versions": record(others=text),
        "host": text,
        "git": record({"commit": text, "changed": switch}),
    }
)
_STEP: dict[str, Take] = {"step": count}
ROWS: dict[str, Take] = {
    METRICS: record(_STEP, others=number_or_nan),
    EVALUATIONS: lambda value: record(_STEP)(_measured(value)),
    COMPLETIONS: record({**_STEP, "completion": _content}, _SAMPLE),
    GROUPS: record(
        _STEP,
        {
            "prompt": _content,
            "prompt_id": label,
            "num_completions": count,
            "completions": several(record(known=_SAMPLE)),
        },
    ),
    HISTOGRAMS: record(_STEP, {"completions": count, "histograms": record(others=several(_bin))}),
    ALARMS: record({**_STEP, "finding": _finding}),
    EVENTS: record(
        {"time": _moment, "role": text, "number": count, "event": text, "host": text},
        {"status": number, "said": text},
    ),
}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The rows of a run's files in the order of steps, its summary (empty if there is none), and
    its options. Unknown numbers are NaN in `metrics` and left out in `evaluations`. `alarms` are
    findings that were reported during the run. `facts` are those of the summary that are known at
    the start: `named`, `versions`, `host` and `git`. `faults` lists the data that could not be
    read."""

    path: Path
    metrics: Sequence[Row]
    evaluations: Sequence[Row]
    completions: Sequence[Row]
    groups: Sequence[Row]
    histograms: Sequence[Row]
    alarms: Sequence[Row]
    summary: Row
    options: Row
    facts: Row
    faults: Sequence[str]

    @property
    def steps(self) -> int:
        """The number of optimizer steps done."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def status(self) -> str:
        """`finished`, `interrupted` or `failed`; else `not ended`, for a run that is still running
        or was killed."""
        of_these_steps = self.summary.get("steps", -1) >= self.steps
        return self.summary.get("status", NOT_ENDED) if of_these_steps else NOT_ENDED


def read_folder(folder: Path, options: Row | None = None) -> RunFolder:
    """Read a folder. `options` are by default read from the folder. A folder without a run has no
    rows and no summary."""
    faults: list[str] = []
    names = (METRICS, EVALUATIONS, COMPLETIONS, GROUPS, HISTOGRAMS, ALARMS)
    rows: dict[str, Any]
    rows = {name.removesuffix(".jsonl"): read_rows(folder / name, faults) for name in names}
    summary = read_summary(folder, faults)
    if options is None:
        written = summary.get("config") or _options(folder / CONFIG, faults)
        options = dict(_well_typed(written))
    facts = read_object(folder / FACTS, _SUMMARY, faults)
    facts |= {name: summary[name] for name in KNOWN_AT_START if name in summary}
    known: dict[str, Any] = {"summary": summary, "options": options, "facts": facts}
    return RunFolder(folder, faults=tuple(faults), **known, **rows)


def read_begun(folder: Path) -> RunFolder:
    """Read a folder. Raises ValueError if no run was started in it."""
    if not any((folder / name).exists() for name in (METRICS, CONFIG, SUMMARY)):
        raise ValueError(
            f"{folder} holds no run: it has neither {METRICS} nor {SUMMARY}; name the output_dir "
            "of one"
        )
    return read_folder(folder)


def read_rows(path: Path, faults: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file that is named in ROWS, sorted by step if they have steps. A text
    with the number of invalid lines is appended to `faults`. An incomplete last line is not
    counted, since the run may be writing it."""
    rows, lost = [], 0
    written = _text(path, faults)
    lines = written.split("\n")
    for place, line in enumerate(lines, 1):
        row = row_of(path.name, line)
        if row is not None:
            rows.append(row)
        elif line.strip() and place < len(lines):
            lost += 1
    if lost and faults is not None:
        faults.append(f"{path}: {counted(lost, 'line')} cannot be read, and left out")
    return sorted(rows, key=lambda row: row.get("step", 0))


def row_of(name: str, line: str) -> dict[str, Any] | None:
    """Return the row in `line`, a line of the file `name`; None if the line is invalid."""
    try:
        return ROWS[name](_parsed(line))
    except UnfitValue:
        return None


def read_summary(folder: Path, faults: list[str] | None = None) -> dict[str, Any]:
    """Return the valid entries of summary.json; empty if there is no such file."""
    return read_object(folder / SUMMARY, _SUMMARY, faults)


def read_object(
    path: Path, take: Take = anything, faults: list[str] | None = None
) -> dict[str, Any]:
    """Return the mapping in a file; empty if there is no file or no valid mapping."""
    written = _text(path, faults)
    try:
        return record()(take(_parsed(written)))
    except UnfitValue:
        if written and faults is not None:
            faults.append(f"{path} is torn or no mapping, and left out")
        return {}


def _text(path: Path, faults: list[str] | None) -> str:
    try:
        # Only regular files are read: reading a pipe might block or have side effects.
        return path.read_text(encoding="utf-8-sig", errors="replace") if path.is_file() else ""
    except OSError as error:
        if faults is not None:
            faults.append(f"{path} cannot be read: {error.strerror}")
        return ""


def _parsed(written: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise UnfitValue from error


def _options(path: Path, faults: list[str]) -> dict[str, Any]:
    try:
        return parse_command_line([str(path)]).to_dict() if path.is_file() else {}
    except (ValueError, OSError) as error:  # of another version; the rows can still be read
        faults.append(f"{path} cannot be read, and left out: {error}")
        return {}


def _well_typed(options: Row) -> Iterator[tuple[str, Any]]:
    """Options whose values have the option's type, and options of other versions."""
    hints = option_types()
    for name, value in options.items():
        try:
            yield name, strict(coerce(name, hints[name], value)) if name in hints else value
        except ValueError:
            continue
