"""Learning curves against completions and seconds, and gradient variance as a function of K.

    PYTHONPATH=src python -m benchmarks.baselines run [--tasks mixture,hidden,countdown,gym]
        [--arms rloo,grpo] [--seeds 0,1,2] [--jobs 2] [--budget N] [--out runs/baselines]
        [--only-tuning] [--list]
    PYTHONPATH=src python -m benchmarks.baselines collect [--out runs/baselines]
    PYTHONPATH=src python -m benchmarks.baselines report [--out runs/baselines]
    PYTHONPATH=src python -m benchmarks.baselines variance [--tasks countdown,gym] [--middle]
    PYTHONPATH=src python -m benchmarks.baselines drawing [--tasks mixture,hidden,countdown,gym]
        [--rate 4e-4]
    PYTHONPATH=src python -m benchmarks.baselines moments [--tasks mixture,hidden,countdown,gym]
        [--rate 4e-4]

`run` executes the cells that have no result, in the folder or in docs/baselines/results, so it may
be stopped and started again. For every arm, a learning rate is chosen from the same grid by runs
with other seeds and other held-out prompts than the reported ones. Then the reported seeds are
trained. `--list` prints what is left and what it costs. `collect` writes finished cells to
docs/baselines/results. `report` writes the tables and pictures of docs/baselines.md (needs the
extra `plots`). `variance` measures the variance of the gradient as a function of K, at the base
model or in the middle of a run. `drawing` measures how much of it remains if prompts are drawn with
weights, and `moments` how much of it other baselines leave, at both. `--rate` is the learning rate
of that run, by default the tuned one. `--budget` in completions is for short trial runs; use a
separate folder for them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.baselines.arms import ARMS, TUNING_SEEDS
from benchmarks.baselines.cells import Cell
from benchmarks.baselines.results import COMMITTED, Results
from benchmarks.baselines.schedule import ROOT, Plan, do_cell, list_left, run_plan
from benchmarks.baselines.tasks import TASKS

DEFAULT_TASKS = ("mixture", "hidden", "countdown", "gym")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns exit status 1 if a cell failed."""
    options = _parse(arguments)
    results = Results(options.out, options.results)
    if options.command == "cell":
        do_cell(options.out, Cell(**json.load(sys.stdin)))
    elif options.command == "collect":
        for task, lines in results.collect().items():
            print(f"{task}: {lines} cells")
    elif options.command == "report":
        from benchmarks.baselines.report import write_report

        write_report(results, TASKS, docs=options.docs)
    elif options.command == "variance":
        from benchmarks.baselines.variance import write_middle_variances, write_variances

        tasks = [TASKS[name] for name in options.tasks]
        if options.middle:
            write_middle_variances(tasks, results, options.rate)
        else:
            write_variances(tasks, results)
    elif options.command == "moments":
        from benchmarks.baselines.moments import write_moments

        write_moments([TASKS[name] for name in options.tasks], results, options.rate)
    elif options.command == "drawing":
        from benchmarks.baselines.drawing import write_drawing

        write_drawing([TASKS[name] for name in options.tasks], results, options.rate)
    else:
        plan = Plan(
            [TASKS[name] for name in options.tasks],
            options.arms,
            options.seeds,
            options.budget,
            options.only_tuning,
        )
        if options.list:
            print("\n".join(list_left(plan, results)))
        else:
            return int(run_plan(plan, results, at_once=options.jobs) > 0)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.baselines")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train what is missing")
    run.add_argument("--arms", type=_names(ARMS), default=list(ARMS), help="with commas between")
    run.add_argument(
        "--seeds", type=_seeds, help="with commas between; default: as many as planned"
    )
    run.add_argument("--jobs", type=int, default=2, help="processes at once")
    run.add_argument("--budget", type=int, help="completions of each run, for a trial")
    run.add_argument("--only-tuning", action="store_true", help="no reported seeds")
    run.add_argument("--list", action="store_true", help="print what is left, and its CPU hours")
    variance = commands.add_parser("variance", help="measure the variance of the gradient")
    variance.add_argument("--middle", action="store_true", help="after half of a run's budget")
    drawing = commands.add_parser("drawing", help="measure what drawing prompts leaves of it")
    moments = commands.add_parser("moments", help="measure what other baselines leave of it")
    for command in (variance, drawing, moments):
        command.add_argument("--rate", type=float, help="learning rate; default: the tuned one")
    some = ("countdown", "gym")
    tasks_of = (
        (run, DEFAULT_TASKS),
        (variance, some),
        (drawing, DEFAULT_TASKS),
        (moments, DEFAULT_TASKS),
    )
    for command, tasks in tasks_of:
        command.add_argument(
            "--tasks", type=_names(TASKS), default=list(tasks), help="with commas between"
        )
    collect = commands.add_parser("collect", help="write finished cells to the committed files")
    report = commands.add_parser("report", help="write tables and pictures")
    report.add_argument("--docs", type=Path, default=ROOT / "docs", help="where baselines.md is")
    cell = commands.add_parser("cell", help="one cell, as JSON on the standard input")
    for command in (run, variance, drawing, moments, collect, report, cell):
        command.add_argument("--out", type=Path, default=Path("runs/baselines"), help="results")
        command.add_argument(
            "--results", type=Path, default=COMMITTED, help="the folder of committed results"
        )
    return parser.parse_args(arguments)


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(known)}")
        return names

    return parse


def _seeds(text: str) -> list[int]:
    seeds = [int(word) for word in text.split(",")]
    for seed in seeds:
        if seed in TUNING_SEEDS:
            raise argparse.ArgumentTypeError(f"seed {seed} is one of the tuning")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
