"""Compares the times that `rloo plan` predicts with the times of runs.

    python -m benchmarks.plan [--case NAME ...] [--repeats 3] [--threads 2] [--results FILE]

For each configuration, three processes are run: a plan, a short run of the configuration, and a
short run of the worst case (no token ends a completion, all prompts have the maximum length). All
are repeated, and medians are shown, since the speed of the machine varies. Results in FILE are not
measured again. Ratios are plan / run in the same repeat, for an optimizer step and for an
evaluation, without rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plan.cases import BY_NAME, CASES, Case

Result = dict[str, Any]
KINDS = ("plan", "expected", "worst")


def measure(case: Case, kind: str, folder: Path, threads: int) -> Result:
    """The result of `benchmarks.plan.side`, and the seconds of the complete process."""
    command = [sys.executable, "-m", "benchmarks.plan.side", kind, case.name, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run(
        [*command, str(threads)], stdout=subprocess.PIPE, env=environment, check=True
    )
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "case": case.name, "kind": kind, "seconds": time.perf_counter() - began}


def table(results: list[Result]) -> str:
    """A Markdown table with a row for each completely measured configuration."""
    lines = [
        "| | plan took | expected step | run | ratio | worst step | run | ratio | evaluation |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if why := case.missing():
            lines.append(f"| {case.title} | not measured: {why} |||||||| ")
            continue
        of_case = [r for r in results if r["case"] == case.name]
        found = {kind: [r for r in of_case if r["kind"] == kind] for kind in KINDS}
        if all(found.values()):
            lines.append(_row(case, found))
    return "\n".join(lines)


def _row(case: Case, found: dict[str, list[Result]]) -> str:
    plans, cells, evaluations = found["plan"], [], []
    for kind in ("expected", "worst"):
        planned, runs = [plan[kind] for plan in plans], found[kind]
        cells += [f"{_middle(planned, 'step'):.3g} s", f"{_middle(runs, 'step'):.3g} s"]
        cells.append(f"**{_ratio(planned, runs, 'step'):.2f}**")
        if "evaluation" in runs[0] and planned[0]["evaluation"]:
            evaluations.append(f"{_ratio(planned, runs, 'evaluation'):.2f}")
    title = case.title if case.fitted else f"{case.title} (not fitted)"
    ends, took = " and ".join(evaluations) or "none", _middle(plans, "seconds")
    return f"| {title} | {took:.0f} s | {' | '.join(cells)} | {ends} |"


def _middle(results: list[Result], name: str) -> float:
    return median(result[name] for result in results)


def _ratio(planned: list[Result], runs: list[Result], name: str) -> float:
    """The ratio of a plan and the run of the same repeat, which the machine slowed down equally."""
    pairs = zip(planned, runs, strict=False)  # the last repeat may be incomplete
    return median(one[name] / run[name] for one, run in pairs)


def main() -> None:
    """Measure the results that FILE does not have, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("runs/plan.jsonl"))
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    there = Counter((result["case"], result["kind"]) for result in results)
    with tempfile.TemporaryDirectory() as temporary:
        wanted = [(BY_NAME[name], kind) for name in options.case for kind in KINDS]
        for repeat, (case, kind) in product(range(options.repeats), wanted):
            if there[case.name, kind] > repeat or case.missing():
                continue
            result = measure(case, kind, Path(temporary) / case.name, options.threads)
            results.append(result)
            with options.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
