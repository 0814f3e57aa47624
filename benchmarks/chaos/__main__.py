"""Fault injection, with the outcomes of the runs: the figures of docs/reliability.md.

    python -m benchmarks.chaos [PART ...] [--trials N] [--seed S] [--jobs 2] [--out .data/chaos]

By default all parts are run, in less than an hour on two cores. `--trials` is the number of trials
for each part; the default is the number in the table. The command may be stopped and started again:
trials that have a result for the same sources are not repeated. The exit status is 1 if a trial
failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import operations
from benchmarks.chaos.results import ROOT, Store, digest, run_all

# These parts print their results themselves.
OTHERS = ("rewards", "verifiers", "inputs")
PARTS = (
    "kills",
    "operations",
    "signals",
    "power",
    "faults",
    "nonfinite",
    "lock",
    "ranks",
    "asynchronous",
)
READY = "RLOO_CHAOS_READY"
FIXED = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "100",
    "TERM": "xterm",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a trial failed."""
    options = _parse(arguments)
    if READY not in os.environ:
        return _start_again(list(sys.argv[1:] if arguments is None else arguments))
    os.environ.pop("LD_PRELOAD", None)  # programs that trials start do not need it
    folder = options.out.resolve() / digest()
    own = [part for part in PARTS if part in options.parts]
    failed = 0
    rows = []
    if own:
        from benchmarks.chaos.harness import Rig
        from benchmarks.chaos.table import plan

        with tempfile.TemporaryDirectory(prefix="rloo-chaos-") as home:
            rig = Rig(Path(home))
            for part in own:
                figure, promised, trials = plan(part, rig, options.trials, options.seed)
                if not trials:
                    rows.append((figure, promised, os.environ[READY], part))
                    continue
                results = run_all(Store(folder, part), trials, options.jobs, rig.whole)
                wrong = {name: said for name, said in results.items() if said}
                for name, said in wrong.items():
                    print(f"{part}, {name}: {said}", flush=True)
                failed += len(wrong)
                rows.append(
                    (figure, promised, f"{len(trials) - len(wrong)} of {len(trials)}", part)
                )
                print(_row(*rows[-1]), flush=True)
    for part in OTHERS:
        if part in options.parts and (Path(__file__).parent / f"{part}.py").exists():
            command = [sys.executable, "-m", f"benchmarks.chaos.{part}"]
            failed += subprocess.run(command, cwd=ROOT).returncode
    if rows:
        print("\n| figure | promised | seen | command |\n|---|---|---|---|")
        for row in rows:
            print(_row(*row))
    return int(failed > 0)


def _row(figure: str, promised: str, seen: str, part: str) -> str:
    return f"| {figure} | {promised} | {seen} | `python -m benchmarks.chaos {part}` |"


def _start_again(arguments: list[str]) -> int:
    """Execute the same command again with a fixed environment and the library that records file
    operations."""
    with tempfile.TemporaryDirectory(prefix="rloo-chaos-") as folder:
        made = operations.build(Path(folder))
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **FIXED, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment[READY] = "yes" if isinstance(made, Path) else f"skipped: {made}"
        if isinstance(made, Path):
            environment |= {"LD_PRELOAD": str(made), "RLOO_CHAOS_LIBRARY": str(made)}
        command = [sys.executable, "-m", "benchmarks.chaos", *arguments]
        return subprocess.run(command, env=environment).returncode


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join((*PARTS, *OTHERS)))
    parser.add_argument("--trials", type=int, help="of each part; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--out", type=Path, default=ROOT / ".data" / "chaos", help="results")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in (*PARTS, *OTHERS):
            parser.error(f"{part} is none of {', '.join((*PARTS, *OTHERS))}")
    options.parts = options.parts or [*PARTS, *OTHERS]
    return options


if __name__ == "__main__":
    sys.exit(main())
