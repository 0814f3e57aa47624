"""Learning curves of RLOO and related estimators, and gradient variance as a function of K.

    PYTHONPATH=src python -m benchmarks.baselines run [--task countdown] [--arms rloo_k8,grpo]
        [--seeds 0,1,2] [--out runs/baselines] [--jobs 2] [--steps N]
    PYTHONPATH=src python -m benchmarks.baselines report [--out runs/baselines]

`run` executes the jobs that have no result in the folder, so it may be stopped and started again.
For every arm, a learning rate is chosen from the same grid. The criterion is the training reward of
a seed that is not reported. Then the reported seeds are trained. `report` writes the tables and
pictures of docs/baselines.md and results.json (needs the extra `plots`). `--steps` is for short
trial runs; use a separate folder for them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.baselines.arms import ARMS, SEEDS, TUNING_SEED, Job
from benchmarks.baselines.results import write_result
from benchmarks.baselines.schedule import ROOT, run_task
from benchmarks.baselines.tasks import TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a job failed."""
    options = _parse(arguments)
    if options.command == "report":
        from benchmarks.baselines.report import write_report

        write_report(options.out, TASKS, docs=options.docs)
        return 0
    if options.command == "job":
        do_job(options.out, Job(**json.load(sys.stdin)))
        return 0
    failed = 0
    for name in options.task or TASKS:
        failed += run_task(
            TASKS[name],
            options.arms,
            options.seeds,
            out=options.out,
            at_once=options.jobs,
            steps=options.steps,
        )
    return int(failed > 0)


def do_job(out: Path, job: Job) -> None:
    """Execute a job in this process and write its result."""
    from benchmarks.baselines.training import run_training
    from benchmarks.baselines.variance import measure

    task = TASKS[job.task]
    if job.arm is None:
        result = measure(task, job.options, out=out)
    else:
        result = run_training(task, job, out=out)
    write_result(out, job, result)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is missing")
    run.add_argument("--task", action="append", choices=TASKS, help="one of them; default: all")
    run.add_argument("--arms", type=_arms, default=list(ARMS), help="names, with commas between")
    run.add_argument("--seeds", type=_seeds, default=list(SEEDS), help="with commas between")
    run.add_argument("--jobs", type=int, default=2, help="processes at once")
    run.add_argument("--steps", type=int, help="of training, for a trial; no gradient variance")
    report = commands.add_parser("report", help="write tables and pictures")
    report.add_argument("--docs", type=Path, default=ROOT / "docs", help="where baselines.md is")
    job = commands.add_parser("job", help="one job, as JSON on the standard input")
    for command in (run, report, job):
        command.add_argument("--out", type=Path, default=Path("runs/baselines"), help="results")
    return parser.parse_args(arguments)


def _arms(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(ARMS)}")
    return names


def _seeds(text: str) -> list[int]:
    seeds = [int(word) for word in text.split(",")]
    if TUNING_SEED in seeds:
        raise argparse.ArgumentTypeError(f"seed {TUNING_SEED} is the one of the tuning")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
