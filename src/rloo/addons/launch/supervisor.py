"""What stays beside a process: it starts it, and again when it has died."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.distributed.child_process import ChildProcess
from rloo.distributed.signal_numbers import STOP_SIGNALS
from rloo.tracking.jsonl import EVENTS

# How often a process beside the ranks is started again, and the pause before it.
RESTARTS, PAUSE_SECONDS = 20, 1.0
# What the threads of a launcher may have blocked.
SIGNALS = {getattr(signal, name) for name in STOP_SIGNALS} | {signal.SIGCHLD}


@dataclass
class Supervisor:
    """Keeps process `number` of a role going, with these variables over those that are here. What
    happens goes to the file EVENTS of `folder`, its output to a log of its own there."""

    role: str
    number: int
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    cwd: str | None = None
    over: threading.Event = field(default_factory=threading.Event)
    tries: int = 0
    process: ChildProcess | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> threading.Thread:
        """Keep it in a thread, which stays until the end: a child ends with the thread that has
        started it."""
        thread = threading.Thread(target=self._keep, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """Have the process end, and give it some seconds for that; it does not start again."""
        self.over.set()
        with self.lock:
            process = self.process
        if process is not None and process.poll() is None:
            process.end(10.0)

    def _keep(self) -> None:
        """Until the run is over, or it has ended in order, or too often."""
        while self.tries <= RESTARTS and (process := self._start()):
            status = process.join()
            self._note("ended", status=status)
            if status == 0 or self.over.wait(PAUSE_SECONDS):
                return
            self.tries += 1

    def _start(self) -> ChildProcess | None:
        name = f"{self.role}-{self.number}"
        with self.lock:
            if self.over.is_set():
                return None
            self.process = ChildProcess(
                self.command,
                environment={**os.environ, **self.environment},
                folder=self.cwd,
                log=self.folder / f"{name}.log",
                unblocked=SIGNALS,
            )
        self._note("started", pid=self.process.pid)
        return self.process

    def _note(self, event: str, **more: Any) -> None:
        note(self.folder, self.role, self.number, event, tries=self.tries, **more)


def note(folder: Path, role: str, number: int, event: str, **more: Any) -> None:
    """Append to the EVENTS of `folder` what has become of a process."""
    row = {
        "time": time.time(), "role": role, "number": number, "event": event,
        "host": socket.gethostname(), **more,
    }  # fmt: skip
    with suppress(OSError), (folder / EVENTS).open("a") as file:
        file.write(json.dumps(row) + "\n")
