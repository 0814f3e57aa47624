"""Is what `rloo plan` says of time what a run then takes?

    python -m benchmarks.plan [--case NAME ...] [--threads 2] [--results FILE]

Of each configuration a plan, a short run as it is, and one of the worst case (no token ends a
completion, all prompts are the longest), each in a process of its own. Goes on where FILE ends.
Ratios are plan / run, of an optimizer step and of an evaluation, without rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.plan.cases import BY_NAME, CASES, Case

Result = dict[str, Any]
KINDS = ("plan", "expected", "worst")


def measure(case: Case, kind: str, folder: Path, threads: int) -> Result:
    """What `benchmarks.plan.side` answers, and the seconds of the whole process."""
    command = [sys.executable, "-m", "benchmarks.plan.side", kind, case.name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, str(threads)], stdout=subprocess.PIPE, env=environment, check=True
    )
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "case": case.name, "kind": kind, "seconds": time.perf_counter() - began}


def table(results: list[Result]) -> str:
    """Markdown: one row for each configuration that was measured whole."""
    lines = [
        "| | plan took | expected step | run | ratio | worst step | run | ratio | evaluation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if why := case.missing():
            lines.append(f"| {case.title} | not measured: {why} |||||||| ")
            continue
        found = {r["kind"]: r for r in results if r["case"] == case.name}
        if set(found) == set(KINDS):
            lines.append(_row(case, found))
    return "\n".join(lines)


def _row(case: Case, found: dict[str, Result]) -> str:
    plan, cells = found["plan"], []
    evaluations = []
    for kind in ("expected", "worst"):
        planned, run = plan[kind], found[kind]
        ratio = planned["step"] / run["step"]
        cells += [f"{planned['step']:.3g} s", f"{run['step']:.3g} s", f"**{ratio:.2f}**"]
        if "evaluation" in run and planned["evaluation"]:
            evaluations.append(f"{planned['evaluation'] / run['evaluation']:.2f}")
    title = case.title if case.fitted else f"{case.title} (not fitted)"
    ends = " and ".join(evaluations) or "none"
    return f"| {title} | {plan['seconds']:.0f} s | {' | '.join(cells)} | {ends} |"


def main() -> None:
    """Measure what FILE does not have yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("runs/plan.jsonl"))
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    there = {(result["case"], result["kind"]) for result in results}
    with tempfile.TemporaryDirectory() as temporary:
        for case in (BY_NAME[name] for name in options.case):
            for kind in KINDS:
                if (case.name, kind) in there or case.missing():
                    continue
                result = measure(case, kind, Path(temporary) / case.name, options.threads)
                results.append(result)
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(json.dumps(result), file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
