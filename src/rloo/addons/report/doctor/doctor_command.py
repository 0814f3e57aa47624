"""Reads a finished or dead run from its files, and prints the doctor's findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rloo.addons.report.doctor.rules import diagnose
from rloo.addons.report.doctor.run_record import LONGEST, RecordedRun
from rloo.config.config import RLOOConfig
from rloo.tracking.finding import Finding
from rloo.tracking.jsonl import CONFIG, METRICS
from rloo.tracking.run_reader import RunFolder, read_folder, read_summary
from rloo.tracking.summary_text import summary_text, training_of


def read_run(folder: Path, options: RLOOConfig | None = None) -> RecordedRun:
    """The run in a folder, with `options` or else the recorded options. Raises ValueError if the
    folder has no run."""
    return _run_in(_require_steps(_read(folder, options)))


def findings_of(
    folder: Path,
    options: RLOOConfig | None = None,
    summary: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """The findings on the run in a folder, from its files and its alarms (also for a run that ended
    before its first step). `summary` replaces a summary that is not written yet."""
    found = _read(folder, options)
    found = found if summary is None else replace(found, summary=summary)
    return _findings_in(found, _run_in(found))


def summary_of(folder: Path, run: RecordedRun) -> dict[str, Any]:
    """The summary that the run has written, completed from its rows. A dead run has no summary; all
    values then come from its rows."""
    start, end = run.measured or ({}, {})
    by_rows = {
        "status": "died",
        "steps": int(run.rows[-1]["step"]) if run.rows else 0,
        "max_steps": run.option("max_steps", 0),
        "start": start,
        "end": end,
        "wall_seconds": max((_known(row, "wall_time") for row in run.rows), default=0.0),
        "refused_steps": sum(bool(row.get("update/nonfinite")) for row in run.rows),
        "training": training_of(run.rollouts),
    }
    return by_rows | read_summary(folder)


def _read(folder: Path, options: RLOOConfig | None) -> RunFolder:
    return read_folder(folder, None if options is None else options.to_dict())


def _require_steps(found: RunFolder) -> RunFolder:
    if not (found.metrics or found.evaluations or found.alarms):
        raise ValueError(
            f"{found.path} has no {METRICS}: no run has made a step there"
            if not found.faults
            else f"{found.path} has no row of a run that can be read: {'; '.join(found.faults)}"
        )
    return found


def _run_in(found: RunFolder) -> RecordedRun:
    path, values = found.path / CONFIG, found.options
    longest = found.summary.get(LONGEST)
    named = path.exists() and all(values.get(name) for name in ("model", "dataset", "reward"))
    return RecordedRun(
        found.metrics,
        found.completions,
        found.evaluations,
        values,
        {} if longest is None else {LONGEST: longest},
        source=(str(path),) if named else (),
    )


def _findings_in(found: RunFolder, run: RecordedRun) -> list[Finding]:
    told = [(row["step"], _of_folder(Finding(**row["finding"]), run)) for row in found.alarms]
    return diagnose(run, told=told)


def _of_folder(alarm: Finding, run: RecordedRun) -> Finding:
    """The finding of an alarm with the command for the folder. During the run there was no
    configuration file that a command could name."""
    return replace(alarm, command=run.command(alarm.options)) if alarm.options else alarm


def report(folder: Path) -> Iterator[str]:
    """The lines of `rloo doctor FOLDER`: the verdict, then each finding in full, then the faults of
    unreadable files."""
    found = _require_steps(read_folder(folder))
    run = _run_in(found)
    findings = _findings_in(found, run)
    known = {"findings": [asdict(finding) for finding in findings]}
    yield from summary_text(summary_of(folder, run) | known).split("\n")
    yield from describe(findings)
    yield from (f"note: {fault}" for fault in found.faults)


def describe(findings: list[Finding]) -> Iterator[str]:
    """The lines that describe each finding in full."""
    if not findings:
        yield "Nothing is wrong by any rule (docs/doctor.md)."
    for number, finding in enumerate(findings, 1):
        yield ""
        yield f"{number}. {finding.title} ({finding.name})"
        yield f"   seen:    {finding.evidence}"
        for example in finding.examples:
            yield f"            {example}"
        yield f"   why:     {finding.why}"
        yield f"   change:  {finding.change}"
        if finding.command:
            yield f"   command: {finding.command}"


def _known(row: Mapping[str, float], name: str) -> float:
    value = row.get(name, math.nan)
    return value if math.isfinite(value) else 0.0
