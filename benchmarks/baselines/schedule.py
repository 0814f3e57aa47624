"""Executes the jobs without a result, each in a separate process with one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.baselines.arms import Job, Task, training_job, tuning_jobs, variance_job
from benchmarks.baselines.results import choose_rate, read_result, tuning_curves

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 6

# Executes a job and writes its result. Raises RuntimeError with the reason if the job fails.
Work = Callable[[Path, Job], None]


def run_in_process(out: Path, job: Job) -> None:
    """Execute a job in a new process. Raises RuntimeError with the end of the output if it
    fails."""
    command = [sys.executable, "-m", "benchmarks.baselines", "job", "--out", str(out.resolve())]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-_LOG_LINES:]))


def run_jobs(out: Path, jobs: Sequence[Job], *, at_once: int, work: Work = run_in_process) -> int:
    """Execute the jobs that have no result, and print a line for each. Returns the number of failed
    jobs. A failure does not stop the other jobs."""
    missing = [job for job in jobs if read_result(out, job) is None]
    print(f"{len(jobs) - len(missing)} of {len(jobs)} jobs are there already", flush=True)

    def do(numbered: tuple[int, Job]) -> bool:
        number, job = numbered
        start, reason = time.perf_counter(), None
        try:
            work(out, job)
        except RuntimeError as error:
            reason = error
        seconds = time.perf_counter() - start
        state = f"FAILED: {reason}" if reason else f"{seconds:.0f} s"
        print(f"[{number}/{len(missing)}] {job.path.with_suffix('')}: {state}", flush=True)
        return reason is None

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(do, enumerate(missing, 1))).count(False)


def run_task(
    task: Task,
    arms: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path,
    at_once: int,
    steps: int | None = None,
    work: Work = run_in_process,
) -> int:
    """Execute the gradient variance, the tuning of every arm, and then all seeds of the arm at the
    chosen learning rate. Returns the number of failed jobs. An arm whose tuning failed has no
    further runs."""
    task.model(out)  # create the model once, before several processes need it
    failed = 0
    jobs = tuning_jobs(task, arms, steps)
    if steps is None:
        jobs.insert(0, variance_job(task))
    failed += run_jobs(out, jobs, at_once=at_once, work=work)
    finals = []
    for arm in arms:
        try:
            rate = choose_rate(tuning_curves(out, task, arm, steps))
        except ValueError as error:
            print(f"left out: {error}", flush=True)
            continue
        finals += [training_job(task, arm, rate=rate, seed=seed, steps=steps) for seed in seeds]
    # Ordered by seed, so that an unfinished comparison has all arms for each finished seed.
    finals.sort(key=lambda job: job.options["seed"])
    return failed + run_jobs(out, finals, at_once=at_once, work=work)
