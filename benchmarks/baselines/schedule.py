"""Executes the cells without a result, each in a process with one thread, and estimates what the
remaining cells cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.baselines.arms import Task
from benchmarks.baselines.cells import Cell, final_cells, tuning_cells
from benchmarks.baselines.results import Results, choose_rate, tuning_scores, write_result

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 8

# Executes a cell and writes its result. Raises RuntimeError with the reason if it fails.
Work = Callable[[Path, Cell], None]


@dataclass(frozen=True)
class Plan:
    """The cells to run: `seeds` None means the number of each task, `budget` None the task's."""

    tasks: Sequence[Task]
    arms: Sequence[str]
    seeds: Sequence[int] | None = None
    budget: int | None = None
    only_tuning: bool = False

    def cells(self, results: Results) -> list[Cell]:
        """The cells that can be run now: the tuning of all arms, and the reported runs of the arms
        whose tuning is finished. Reported runs are ordered by seed, so that an unfinished
        comparison has all arms for each finished seed."""
        found: list[Cell] = []
        for task in self.tasks:
            finals: list[Cell] = []
            for arm in filter(task.takes, self.arms):
                found += tuning_cells(task, arm, self.budget)
                if self.only_tuning:
                    continue
                try:
                    rate = choose_rate(tuning_scores(results, task, arm, self.budget))
                except ValueError:
                    continue
                finals += final_cells(task, arm, rate, self.seeds_of(task, arm), self.budget)
            found += sorted(finals, key=lambda cell: cell.seed)
        return found

    def num_cells(self, task: Task, arm: str) -> int:
        """The number of cells of an arm, with those whose learning rate is not known yet."""
        finals = 0 if self.only_tuning else len(self.seeds_of(task, arm))
        return len(tuning_cells(task, arm, self.budget)) + finals

    def seeds_of(self, task: Task, arm: str) -> Sequence[int]:
        planned = (*task.seeds_of(arm), *task.confirming_seeds(arm))
        return planned if self.seeds is None else self.seeds


def run_in_process(out: Path, cell: Cell) -> None:
    """Execute a cell in a new process. Raises RuntimeError with the end of its output if it
    fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.baselines", "cell", "--out", str(out.resolve())],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        input=json.dumps(asdict(cell)),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-_LOG_LINES:]))


def run_plan(plan: Plan, results: Results, *, at_once: int, work: Work = run_in_process) -> int:
    """Execute what is missing. A finished tuning adds the reported runs of its arm; an arm whose
    tuning failed has none. Returns the number of failed cells; a failure does not stop others."""
    for task in plan.tasks:
        task.model(results.out)  # created once, before several processes need it
    failed: set[str] = set()
    while True:
        cells = plan.cells(results)
        missing = [c for c in cells if c.name not in failed and results.read(c) is None]
        if not missing:
            return len(failed)
        print(f"{len(cells) - len(missing)} cells are there, {len(missing)} to run", flush=True)
        failed |= run_cells(missing, results.out, at_once=at_once, work=work)


def run_cells(cells: Sequence[Cell], out: Path, *, at_once: int, work: Work) -> set[str]:
    """Execute cells, and print a line for each. Returns the names of the failed ones."""

    def do(numbered: tuple[int, Cell]) -> str | None:
        number, cell = numbered
        start, reason = time.perf_counter(), None
        try:
            work(out, cell)
        except RuntimeError as error:
            reason = error
        seconds = time.perf_counter() - start
        state = f"FAILED: {reason}" if reason else f"{seconds:.0f} s"
        print(f"[{number}/{len(cells)}] {cell.name}: {state}", flush=True)
        return cell.name if reason else None

    with ThreadPoolExecutor(at_once) as pool:
        return {name for name in pool.map(do, enumerate(cells, 1)) if name}


def do_cell(out: Path, cell: Cell) -> None:
    """Execute a cell in this process and write its result."""
    from benchmarks.baselines.tasks import TASKS
    from benchmarks.baselines.training import run_cell

    write_result(out, cell, run_cell(TASKS[cell.task], cell, out=out))


def list_left(plan: Plan, results: Results) -> list[str]:
    """Lines of what is left: cells by task and arm, with CPU hours by the mean seconds of the
    finished cells of the arm (of the task, if the arm has none), and the sum."""
    seconds: dict[str, list[float]] = {}
    for made, result in results.all_results():
        for name in (f"{made['task']}/{made['arm']}", made["task"]):
            seconds.setdefault(name, []).append(result["cell_cpu"] / made["budget"])
    done: dict[tuple[str, str], int] = {}
    for cell in plan.cells(results):
        key = cell.task, cell.arm
        done[key] = done.get(key, 0) + (results.read(cell) is not None)
    lines, total, unknown = [], 0.0, 0
    for task in plan.tasks:
        for arm in filter(task.takes, plan.arms):
            left = plan.num_cells(task, arm) - done.get((task.name, arm), 0)
            known = seconds.get(f"{task.name}/{arm}") or seconds.get(task.name)
            if not left:
                continue
            each = fmean(known) * (plan.budget or task.budget) if known else None
            unknown += left if each is None else 0
            total += left * (each or 0.0) / 3600
            cost = "not measured" if each is None else _hours(left, each)
            lines.append(f"{task.name}/{arm}: {left} cells, {cost}")
    rest = f", and {unknown} cells that were never measured" if unknown else ""
    return [*lines, f"left: {total:.1f} CPU hours{rest}"]


def _hours(cells: int, seconds: float) -> str:
    return f"{seconds:.0f} s each, {cells * seconds / 3600:.2f} CPU hours"
