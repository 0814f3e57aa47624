"""A job on this machine: the ranks as `rloo train --num_processes` starts them, and beside them the
processes that sample, serve and score, each started again when it has died."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.dist.signals import STOP_SIGNALS
from rloo.launch.roles import RLOO, Job, Role, program
from rloo.report.records import LOGS
from rloo.run.launch import SAVING, in_child, launch

EVENTS = "launch.jsonl"
# How often a process beside the ranks is started again, and the pause before it.
RESTARTS, PAUSE_SECONDS = 20, 1.0
# What the launcher's threads may have blocked.
_SIGNALS = {getattr(signal, name) for name in STOP_SIGNALS} | {signal.SIGCHLD}


def run_here(job: Job, *, saving: float = SAVING) -> int:
    """Run a job on this machine; its status, as that of `rloo.run.launch.launch`."""
    environment = {"MASTER_ADDR": "127.0.0.1", **job.environment}
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        with _beside(job):
            config = job.config.with_values(num_processes=job.trainer.count)
            return launch([*job.arguments, *job.extra, *_urls(job)], config, saving=saving)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def script(job: Job) -> str:
    """The job as a script of bash, without the watch over what dies: what `--dry_run` shows."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {job.trainer.count} to train" + "".join(f", {r.count} {r.name}s" for r in job.others),
        "set -u",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
        *(f"export {name}={value}" for name, value in job.environment.items()),
        *job.cluster.setup,
        "",
    ]
    for role in job.others:
        for number in range(role.count):
            settings = "".join(f"{n}={v} " for n, v in environment_of(job, role, number).items())
            lines.append(f"{settings}{role.line} &")
    count = ["--num_processes", str(job.trainer.count)]
    lines += [f"{job.trainer.line} {shlex.join([*count, *job.extra, *_urls(job)])}", ""]
    return "\n".join(lines)


def _urls(job: Job) -> list[str]:
    ports = range(job.servers.count if job.servers else 0)
    return [f"http://127.0.0.1:{job.cluster.port + 1 + number}" for number in ports]


def environment_of(job: Job, role: Role, number: int) -> dict[str, str]:
    """The variables of process `number` of a role on this machine."""
    found = {}
    if role.gpus:
        first = job.trainer.count + number * role.gpus
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + role.gpus)))
    if role.name == "server":
        found["PORT"] = str(job.cluster.port + 1 + number)
    return found


@dataclass
class Keeper:
    """Starts a process, and again when it has ended before it should; what happens goes to the
    folder's file EVENTS. Its output goes to a log of its own."""

    job: Job
    role: Role
    number: int
    folder: Path
    over: threading.Event
    tries: int = 0
    process: subprocess.Popen[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self) -> None:
        """Until the run is over, or it has ended in order, or too often."""
        while not self.over.is_set() and self.tries <= RESTARTS:
            self._start()
            assert self.process is not None
            status = self.process.wait()
            self._note("ended", status=status)
            if status == 0 or self.over.wait(PAUSE_SECONDS):
                return
            self.tries += 1

    def end(self) -> None:
        """Have the process end, and give it some seconds for that."""
        with self.lock:
            process = self.process
            if process is None or process.poll() is not None:
                return
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        process.kill()

    def _start(self) -> None:
        name = f"{self.role.name}-{self.number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = shlex.split(self._line())
        with self.lock, (self.folder / f"{name}.log").open("ab") as log:
            if self.over.is_set():
                return
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment_of(self.job, self.role, self.number)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=in_child(_SIGNALS),
            )
        self._note("started", pid=self.process.pid)

    def _line(self) -> str:
        settings = environment_of(self.job, self.role, self.number)
        line = self.role.line.replace("$PORT", settings.get("PORT", ""))
        return shlex.join(program()) + line.removeprefix(RLOO)

    def _note(self, event: str, **more: Any) -> None:
        row = {
            "time": time.time(), "role": self.role.name, "number": self.number, "event": event,
            "host": socket.gethostname(), "tries": self.tries, **more,
        }  # fmt: skip
        with suppress(OSError), (self.folder / EVENTS).open("a") as file:
            file.write(json.dumps(row) + "\n")


@contextmanager
def _beside(job: Job) -> Iterator[None]:
    """The processes beside the ranks, as long as this block takes."""
    over, folder = threading.Event(), Path(job.config.output_dir).absolute() / LOGS
    keepers = [
        Keeper(job, role, number, folder, over)
        for role in job.others
        for number in range(role.count)
    ]
    # Each stays until the end: a child ends with the thread that has started it.
    threads = [threading.Thread(target=keeper.keep, daemon=True) for keeper in keepers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for keeper in keepers:
            keeper.end()
        for thread in threads:
            thread.join(15.0)
        sys.stderr.flush()
