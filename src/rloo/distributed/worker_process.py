"""Worker processes. Each worker answers one call after the other, and ends with this process.

A worker is a new interpreter, not a fork, so it inherits no locks of other threads. Calls and
answers are bytes over a private pair of sockets. For workers that are started outside of the run,
on any machine, see `rloo.distributed.worker_registry`.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rloo.distributed.child_process import ChildProcess, describe_status

ANSWER, FAILURE = b"a", b"f"
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rloo.distributed.worker_main import main; main(sys.argv[2], *map(int, sys.argv[3:]))"
)


class WorkerDied(OSError):
    """Raised if a worker has died, or was killed because it did not answer in time. `status` is the
    worker's exit status, negative for a signal. It is None if this process killed the worker, or if
    the status is unknown."""

    def __init__(self, name: str, fact: str, status: int | None = None) -> None:
        super().__init__(f"the process {name} {fact}")
        self.status = status


class Worker(ABC):
    """The process at the other end of a connection, which answers calls. The process first receives
    the bytes `setup`."""

    def __init__(self, name: str, connection: Connection, setup: bytes) -> None:
        self.name = name
        self._connection = connection
        self._setup: bytes | None = setup
        self._closing = threading.Lock()

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process id on the worker's machine."""

    @property
    def is_alive(self) -> bool:
        """False if the process is known to have ended."""
        return True

    @abstractmethod
    def kill(self) -> None:
        """Kill the process. A pending call raises WorkerDied. Thread-safe."""

    @abstractmethod
    def end(self) -> None:
        """Kill the process and close its connection. Thread-safe, and may be repeated."""

    def _disconnect(self) -> None:
        """Close the connection; the caller holds the lock `_closing`. Without the lock, two threads
        could close the descriptor twice, and the second time its number may belong to another
        file."""
        with suppress(OSError):
            self._connection.close()

    @abstractmethod
    def _status(self) -> int | None:
        """The exit status of a process that has closed its connection: see `WorkerDied`."""

    def call(self, message: bytes, seconds: float | None = None) -> bytes:
        """Return the answer to a message. Raises WorkerDied if the worker ends, or does not answer
        within `seconds` (None: no limit). Also raises the error that the call raised in the
        worker."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        # A timer, since writing also blocks if the process is stopped.
        timer = threading.Timer(seconds or 0.0, give_up)
        timer.daemon = True
        try:
            if seconds is not None:
                timer.start()
            if self._setup is not None:
                self._connection.send_bytes(self._setup)
                self._setup = None
            self._connection.send_bytes(message)
            said = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            status = self._status()
            if late.is_set():
                raise WorkerDied(self.name, f"did not answer within {seconds:g} s") from error
            raise WorkerDied(self.name, describe_status(status), status) from error
        finally:
            timer.cancel()
        if said[:1] == FAILURE:
            raise error_of(json.loads(said[1:]))
        return said[1:]


class LocalWorker(Worker):
    """A worker that this process starts. The worker calls `target` (`module:function`) with the
    bytes `setup`. `target` returns a function, which the worker calls with the bytes of every call.
    With `group`, the worker's children are killed with the worker."""

    def __init__(self, name: str, target: str, setup: bytes, *, group: bool = False) -> None:
        connection, theirs = Pipe()
        super().__init__(name, connection, setup)
        self._group = group
        with theirs:
            self._process = start(target, theirs.fileno())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """See `Worker`."""
        return self._process.poll() is None

    def kill(self) -> None:
        """See `Worker`."""
        if self._group:
            self._process.kill_group()
        self._process.kill()

    def end(self) -> None:
        """See `Worker`."""
        self._process.end(group=self._group)
        with self._closing:
            self._disconnect()

    def _status(self) -> int:
        status = self._process.wait(10.0)
        # None: the process has closed its connection but still runs.
        return self._process.end() if status is None else status


def start(target: str, channel: int) -> ChildProcess:
    """Start an interpreter with `target`. The interpreter answers calls over the descriptor
    `channel` until the other end is closed or this process ends."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), target]
    # The tie is a lifeline, since the thread that starts the worker may end before the worker. With
    # a lifeline the worker also detects its parent's death during a computation.
    return ChildProcess(command, "lifeline", channel=channel)


def describe(error: BaseException, trace: str) -> bytes:
    """An error as bytes, in the form that a worker sends."""
    notes = list(getattr(error, "__notes__", ()))
    kind, name = type(error), type(error).__name__
    known = {"type": name, "module": kind.__module__, "text": str(error), "notes": notes}
    return json.dumps(known | {"trace": trace}).encode()


def error_of(said: dict[str, Any]) -> Exception:
    """The error that a worker sent. The error has the original type if that type is a builtin or
    belongs to this package. Otherwise it is a RuntimeError."""
    kind, text = None, said["text"]
    if said["module"] == "builtins" or said["module"].startswith("rloo."):
        kind = getattr(importlib.import_module(said["module"]), said["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, text = RuntimeError, f"{said['type']}: {text}"
    try:
        error: Exception = kind(text)
    except TypeError:  # UnicodeDecodeError and others need more arguments
        error = RuntimeError(f"{said['type']}: {text}")
    for note in said["notes"]:
        error.add_note(note)
    error.add_note(f"in another process:\n{said['trace'].rstrip()}")
    return error
