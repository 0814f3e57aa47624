"""Starts a process, and restarts the process if it dies."""

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

from rloo.addons.launch.local_ranks import BAD_INPUT
from rloo.distributed.child_process import ChildProcess
from rloo.distributed.signal_numbers import STOP_SIGNALS
from rloo.tracking.jsonl import EVENTS

# The largest number of restarts of a supervised process, and the seconds before each restart.
RESTARTS, PAUSE_SECONDS = 20, 1.0
# The event of a process that refuses its options.
REFUSED = "refused"
# Signals that a launcher's thread may have blocked.
SIGNALS = {getattr(signal, name) for name in STOP_SIGNALS} | {signal.SIGCHLD}


@dataclass
class Supervisor:
    """Restarts process `number` of a role if the process dies. `environment` is added to the
    environment of this process. Events are written to the file EVENTS in `folder`, output to a log
    in `folder`. If the process exits with status 2, it is not restarted, and `refusal` is a
    sentence with the last line of the log."""

    role: str
    number: int
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    cwd: str | None = None
    over: threading.Event = field(default_factory=threading.Event)
    tries: int = 0
    refusal: str | None = None
    process: ChildProcess | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> threading.Thread:
        """Supervise in a new thread, and return the thread. It runs until the process is not
        restarted any more, since a child process dies with the thread that started it."""
        thread = threading.Thread(target=self._keep, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """End the process within some seconds, without a restart."""
        self.over.set()
        with self.lock:
            process = self.process
        if process is not None and process.poll() is None:
            process.end(10.0)

    def _keep(self) -> None:
        """Restart the process until the run is over, or the process has exited with 0, has refused
        its options or has died too often."""
        while self.tries <= RESTARTS and (process := self._start()):
            status = process.join()
            self._note("ended", status=status)
            if status == BAD_INPUT and not self.over.is_set():
                said = process.last_lines(1).strip().removeprefix("rloo: ")
                self.refusal = (
                    f"{self.role} {self.number} refuses its options (status {status}): {said} "
                    f"({process.log}); all ranks save and end"
                )
                self._note(REFUSED, said=self.refusal)
                return
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
    """Append an event of a process to the EVENTS file of `folder`."""
    row = {
        "time": time.time(), "role": role, "number": number, "event": event,
        "host": socket.gethostname(), **more,
    }  # fmt: skip
    with suppress(OSError), (folder / EVENTS).open("a") as file:
        file.write(json.dumps(row) + "\n")
