"""A run from its files, whether it ended or died, and what the doctor says of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo.config.config import RLOOConfig
from rloo.config.parsing import parse_command_line
from rloo.report.doctor.finding import Finding, Run
from rloo.report.doctor.rules import diagnose
from rloo.report.records import ALARMS, COMPLETIONS, EVALUATIONS, METRICS, SUMMARY
from rloo.report.verdict import training_of, verdict

CONFIG = "config.yaml"


def read_run(folder: Path, options: RLOOConfig | None = None) -> Run:
    """The run in a folder, with its options or else those of its config.yaml. Raises ValueError
    where there is none."""
    if not (folder / METRICS).exists() and not (folder / EVALUATIONS).exists():
        raise ValueError(f"{folder} has no {METRICS}: no run has made a step there")
    path = folder / CONFIG
    if options is None and path.exists():
        options = parse_command_line([str(path)])
    named = options is not None and options.model and options.dataset and options.reward
    return Run(
        [_numbers(row) for row in rows_of(folder / METRICS)],
        list(rows_of(folder / COMPLETIONS)),
        list(rows_of(folder / EVALUATIONS)),
        {} if options is None else options.to_dict(),
        source=(str(path),) if named else (),
    )


def findings_of(folder: Path, options: RLOOConfig | None = None) -> list[Finding]:
    """What is wrong with the run in a folder: by its files, and by alarms of what was known before
    its first step, which they do not tell again. Nothing is, where no step was made."""
    if not (folder / METRICS).exists():
        return []
    told = [(row["step"], Finding(**row["finding"])) for row in rows_of(folder / ALARMS)]
    return diagnose(read_run(folder, options), told=told)


def summary_of(folder: Path, run: Run) -> dict[str, Any]:
    """The summary that the run has written, or for one that has died what its files tell."""
    path = folder / SUMMARY
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    start, end = run.measured or ({}, {})
    return {
        "status": "died",
        "steps": int(run.rows[-1]["step"]) if run.rows else 0,
        "max_steps": run.option("max_steps", 0),
        "start": start,
        "end": end,
        "wall_seconds": math.fsum(row.get("step_time", 0.0) for row in run.rows),
        "refused_steps": sum(bool(row.get("update/nonfinite")) for row in run.rows),
        "training": training_of(run.rollouts),
    }


def report(folder: Path) -> Iterator[str]:
    """The lines of `rloo doctor FOLDER`: the verdict, then each finding with all that belongs to
    it."""
    run, findings = read_run(folder), findings_of(folder)
    known = {"findings": [asdict(finding) for finding in findings]}
    yield from verdict(summary_of(folder, run) | known).split("\n")
    yield from describe(findings)


def closing(findings: Sequence[Finding], folder: str) -> Iterator[str]:
    """Findings as lines under a verdict, which begins with the first one that voids a run."""
    void = next((finding for finding in findings if finding.voids), None)
    for finding in findings:
        yield f"Change: {finding.change}." if finding is void else finding.line
    if findings:
        yield f"More about it: rloo doctor {folder}"


def describe(findings: list[Finding]) -> Iterator[str]:
    """Each finding in full."""
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


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, without what a kill has torn."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in row.items()}
