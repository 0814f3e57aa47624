"""python -m benchmarks.broken_runs [--part fit|judge] [--only TEXT] [--advice] [--results FILE] ...

Executes each run, runs the doctor on it, and prints how many problems were found correctly. With
--advice, each run with a problem is repeated with the options that each finding recommends. The
output then shows whether the problem is gone or the held-out figure is better. Cases with a result
in FILE are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.broken_runs.cases import Case, cases
from benchmarks.broken_runs.making import options_of, run
from rloo.tracking.before_after import change_between

if TYPE_CHECKING:
    from rloo.addons.report.doctor.run_record import RecordedRun

Result = dict[str, Any]
# The intended reward, also of runs that train with another reward.
FIGURE = "rewards/countdown_reward/mean"


def make(case: Case, folder: Path, *, again: bool) -> Result:
    """Execute and judge the run of a case. With `again`, judge the existing run."""
    if again and not case.before:
        return judge(case, folder)
    shutil.rmtree(folder, ignore_errors=True)
    if case.before:
        return _before(case, folder)
    run(case, folder)
    return judge(case, folder)


def _before(case: Case, folder: Path) -> Result:
    """Examine a configuration before a run, as the command does."""
    from rloo import RLOOConfig
    from rloo.addons.report.doctor.dry_run import findings_before

    options = {**options_of(case, folder), "reward": list(case.reward)}
    found = findings_before(RLOOConfig(**options), folder)
    advice = {finding.name: dict(finding.options) for finding in found if finding.options}
    return {**_result(case, [finding.name for finding in found]), "advice": advice}


def follow(case: Case, result: Result, folder: Path) -> list[Result]:
    """The results of repeating a run with the options that each of its findings recommends."""
    before, told = _held_out(folder), []
    for name, options in result["advice"].items():
        again = folder.with_name(f"{folder.name}-{name}")
        shutil.rmtree(again, ignore_errors=True)
        after = make(replace(case, options=case.options | options), again, again=False)
        moved = change_between(before, _held_out(again), FIGURE).moved if before else None
        gone = name not in after["named"]
        told.append({"finding": name, "options": options, "gone": gone, "moved": moved,
            "then": after["named"]})  # fmt: skip
    return told


def _held_out(folder: Path) -> dict[str, Any]:
    """The last evaluation of the task's reward, with the final weights of the run; empty without
    evaluations."""
    from rloo.addons.report.doctor.doctor_command import read_run

    rows = [row for row in read_run(folder).evaluations if row.get(FIGURE) is not None]
    best = [row for row in rows if row.get("name") == "best"]
    return dict((best or rows)[-1]) if rows else {}


def judge(case: Case, folder: Path) -> Result:
    """The doctor's findings on a run, and whether they are correct."""
    from rloo.addons.report.doctor.doctor_command import findings_of, read_run, summary_of
    from rloo.tracking.summary_text import summary_text

    findings = findings_of(folder)
    summary = summary_of(folder, read_run(folder)) | {"findings": [asdict(f) for f in findings]}
    said = summary_text(summary)
    named = [finding.name for finding in findings]
    alarms = _alarms(folder, read_run(folder))
    advice = {finding.name: dict(finding.options) for finding in findings if finding.options}
    return {**_result(case, named, alarms, said), "advice": advice}


def _praises(verdict: str) -> bool:
    return any(" rose " in line and "larger than chance" in line for line in verdict.split("\n"))


def _alarms(folder: Path, run: RecordedRun) -> list[str]:
    """Names of alarms: those recorded before the first step, and those that the live rules raise
    for the steps."""
    from rloo.addons.report.doctor.live_rules import LiveDoctor
    from rloo.tracking.jsonl import ALARMS
    from rloo.tracking.run_reader import read_rows

    told = [row["finding"]["name"] for row in read_rows(folder / ALARMS) if row["step"] == 0]
    watch = LiveDoctor(run.config)
    watch.told |= set(told)
    for row in run.rows:
        watch.add(row)
        told += [finding.name for finding in watch.news()]
        watch.add_completions([c for c in run.completions if c["step"] == row["step"]])
    return told


def _result(case: Case, named: list[str], alarms: Sequence[str] = (), said: str = "") -> Result:
    sick = bool(case.wrong)
    return {
        "wrong": list(case.wrong),
        "named": named,
        "alarms": list(alarms),
        "right": bool(set(named) & set(case.wrong)) if sick else not named and not alarms,
        "first": sick and bool(set(named[:1]) & set(case.wrong)),
        "praised": sick and case.dead and _praises(said),
        "verdict": said,
    }


def main() -> int:
    """Execute the runs without a result, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("fit", "judge"), default="judge")
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--results", type=Path, default=Path("sick.jsonl"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here")
    parser.add_argument("--advice", action="store_true", help="and try what findings say")
    parser.add_argument("--again", action="store_true", help="judge what --keep has kept")
    given = parser.parse_args()
    wanted = [case for case in cases(given.part) if given.only in case.key]
    done = {row["case"]: row for row in _read(given.results)}
    until = time.monotonic() + 60 * given.minutes
    for case in wanted:
        if case.key in done or time.monotonic() > until:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = (given.keep or Path(temporary)) / case.key
            if given.again and not folder.exists():
                continue
            began, said = time.monotonic(), io.StringIO()
            try:
                with contextlib.redirect_stdout(said):
                    result = make(case, folder, again=given.again)
                    if given.advice and case.wrong and not case.before:
                        result["followed"] = follow(case, result, folder)
            except Exception:  # a failed case is reported, and the next one is executed
                traceback.print_exc()
                continue
        result |= {"case": case.key, "seconds": round(time.monotonic() - began, 1)}
        done[case.key] = result
        with given.results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(_line(result), flush=True)
    print(table([done[case.key] for case in wanted if case.key in done]))
    return 0


def table(results: list[Result]) -> str:
    """Counts of runs with correct findings, and of false alarms."""
    sick = [row for row in results if row["wrong"]]
    healthy = [row for row in results if not row["wrong"]]
    followed = [tried for row in sick for tried in row.get("followed", ())]
    helped = [tried for tried in followed if tried["gone"] or tried["moved"] == 1]
    others = Counter(name for row in healthy for name in {*row["named"], *row["alarms"]})
    return "\n".join(
        [
            f"| sick runs | {len(sick)} |",
            f"| named right | {sum(row['right'] for row in sick)} |",
            f"| named right, and first | {sum(bool(row['first']) for row in sick)} |",
            f"| praised although dead | {sum(row['praised'] for row in sick)} |",
            f"| healthy runs | {len(healthy)} |",
            f"| with a false alarm | {sum(not row['right'] for row in healthy)} |",
            f"| advice followed | {len(followed)} |",
            f"| sickness gone, or held-out figure better | {len(helped)} |",
            f"| held-out figure worse | {sum(tried['moved'] == -1 for tried in followed)} |",
            *(f"| false: {name} | {count} |" for name, count in others.items()),
        ]
    )


def _read(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _line(row: Result) -> str:
    mark = "right" if row["right"] else "WRONG"
    praised = "  PRAISED" if row["praised"] else ""
    return (
        f"{mark:6}{row['case']:28} {row['seconds']:5.1f} s  {','.join(row['named'])}  "
        f"[{','.join(row['alarms'])}]{praised}"
    )


if __name__ == "__main__":
    sys.exit(main())
