"""Alternates processes. Each process is a `benchmarks.measure` that loads, does a warm-up step and
waits. Then each does one step per round, so that only one process computes at a time.

Every result is passed on immediately as a record (see `benchmarks.results`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import jobs
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
_LOG_LINES = 6

Record = dict[str, Any]
Keep = Callable[[Record], None]


class SideError(RuntimeError):
    """A side ended before its work was done. The message has the end of its output."""


@dataclass(frozen=True)
class Spec:
    """A side of the command line, NAME:OPTION=VALUE,..."""

    label: str
    name: str
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, _, options = text.partition(":")
        words = re.split(r",(?![^\[]*\])", options)  # a comma inside a list is no separator
        return cls(text, name, tuple(filter(None, words)))


@dataclass(frozen=True)
class Setting:
    """The settings of all sides. `gsm8k` is a folder with train.jsonl."""

    threads: int
    gsm8k: str | None = None


@dataclass(frozen=True)
class Task:
    """The work of a side: rounds of a workload with a seed. Rounds are counted from 1 and have
    different prompts."""

    spec: Spec
    workload: Workload
    seed: int
    rounds: tuple[int, ...]


class Side:
    """A running process of `benchmarks.measure`."""

    def __init__(self, spec: Spec, job: Path, folder: Path, threads: int) -> None:
        folder.mkdir()
        self._log = folder / "log"
        self.label = spec.label
        words = [spec.name, str(job), str(folder), *spec.options]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [find_python(spec.name), "-m", "benchmarks.measure", *words],
                cwd=ROOT,
                env=_environment(threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read(self) -> Record:
        """Wait for the report of the current step."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise SideError(f"{self.label} ended: " + "\n".join(lines[-_LOG_LINES:]))
        answer: Record = json.loads(line)
        return answer

    def step(self) -> Record:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` raises the reason
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Close the input, which ends the process. If it does not end, kill it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _environment(threads: int) -> dict[str, str]:
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [given])])
    quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {
        **os.environ,
        **quiet,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }


@functools.cache
def find_python(side: str) -> str:
    """The Python with the packages of a side: this one, or the one of a peer's environment."""
    if side == "vllm":
        environment = "vllm"
    elif side == "trl" and importlib.util.find_spec("trl") is None:
        environment = "trl"
    else:
        return sys.executable
    command = [str(ROOT / "tools" / "peers_env.sh"), environment]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SideError(f"no environment for {side}: {done.stderr[-500:]}")
    return done.stdout.strip()


def why_not(spec: Spec) -> str | None:
    """The reason why a measurement of the side is meaningless on this machine, or None."""
    if spec.name == "trl" and "onednn=null" in spec.options:
        from rloo.kernels.cpu_matmul import choose

        if not choose():
            return "oneDNN is no faster than MKL here, which TRL has anyway"
    return None


# -- turns -----------------------------------------------------------------------------------------


def measure(tasks: Sequence[Task], setting: Setting, keep: Keep) -> None:
    """Alternate the sides of tasks with one seed. `keep` is called with a record after a side's
    warm-up ("start"), for each step ("step"), and if a side fails ("error") or is meaningless on
    this machine ("skipped"). All records of a call have the same `run`. Only steps with the same
    `run` were measured side by side."""
    run = f"{time.time():.0f}"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        turns: list[_Turn] = []
        for number, task in enumerate(tasks):
            job = jobs.make_job(task.workload, task.rounds, task.seed, setting)
            turn = _Turn(task, job, run, keep)
            turns.append(turn)
            stack.callback(turn.close)
            turn.start(Path(folder) / str(number), setting.threads)
            if task.workload.alone:
                turn.steps(task.rounds)
                turn.close()
        for number in sorted({number for task in tasks for number in task.rounds}):
            for turn in turns:
                turn.steps([number])


class _Turn:
    """A task, and the side that executes it while it runs."""

    def __init__(self, task: Task, job: dict[str, Any], run: str, keep: Keep) -> None:
        self._task, self._job, self._keep = task, job, keep
        self._side: Side | None = None
        self._facts = {
            "work": jobs.digest(job),
            "run": run,
            "workload": task.workload.name,
            "seed": task.seed,
            "side": task.spec.label,
        }

    def start(self, folder: Path, threads: int) -> None:
        """Start the side, and wait for the end of its warm-up."""
        spec = self._task.spec
        if reason := why_not(spec):
            self._note("skipped", reason=reason)
            return
        folder.mkdir()
        file = folder / "job.json"
        file.write_text(json.dumps(self._job), encoding="utf-8")
        kept = {name: self._job[name] for name in self._job if name not in jobs.PROMPTS}
        with self._failing():
            self._side = Side(spec, file, folder / "side", threads)
            warm_up = self._side.read()
            self._note("start", job=kept, warm_up=warm_up)
            _say(f"{spec.label} is warm after {warm_up['seconds']:.1f} s")

    def steps(self, rounds: Sequence[int]) -> None:
        """Execute the steps of `rounds` that are in the task."""
        size = self._task.workload.num_prompts
        for number in rounds:
            if self._side is None or number not in self._task.rounds:
                continue
            place = 1 + self._task.rounds.index(number)  # the first prompts are for the warm-up
            prompts = self._job["prompt_ids"][place * size : (place + 1) * size]
            with self._failing():
                step = self._side.step()
                self._note("step", round=number, prompt_tokens=list(map(len, prompts)), step=step)

    def close(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None

    @contextlib.contextmanager
    def _failing(self) -> Any:
        try:
            yield
        except SideError as error:
            self._note("error", reason=str(error))
            self.close()

    def _note(self, kind: str, **content: Any) -> None:
        if "reason" in content:
            _say(f"{self._task.spec.label}: {content['reason']}")
        self._keep({"kind": kind, **self._facts, **content})


def _say(line: str) -> None:
    print(f"[benchmark] {line}", file=sys.stderr, flush=True)
