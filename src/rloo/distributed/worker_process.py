"""Processes of ours beside a run: each answers one call after the other, and ends when we do.

A worker is a new interpreter, not a fork: what threads of this process hold is none of its. What
it is sent and what it answers are bytes, over a pair of sockets that only the two have. Those that
others have started, on whatever machine, are in `rloo.distributed.worker_registry`.
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
    """A worker has died, or did not answer in time and was ended. `status` is that with which it
    ended by itself, minus a signal's number, None where we have ended it."""

    def __init__(self, name: str, fact: str, status: int | None = None) -> None:
        super().__init__(f"the process {name} {fact}")
        self.status = status


class Worker(ABC):
    """What answers calls at the other end of a connection, after it was told the bytes `setup`."""

    def __init__(self, name: str, connection: Connection, setup: bytes) -> None:
        self.name = name
        self._connection = connection
        self._setup: bytes | None = setup
        self._closing = threading.Lock()

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process's number, on its machine."""

    @property
    def is_alive(self) -> bool:
        """False for a process that is known to have ended."""
        return True

    @abstractmethod
    def kill(self) -> None:
        """Have the process end; a call under way raises WorkerDied. For any thread."""

    @abstractmethod
    def end(self) -> None:
        """Kill the process, if it lives, and close what led to it. For any thread, also twice."""

    def _disconnect(self) -> None:
        """Close the connection, under the lock `_closing`: two threads at once would close its file
        twice, and the second time it may be another one's."""
        with suppress(OSError):
            self._connection.close()

    @abstractmethod
    def _status(self) -> int | None:
        """With what it has ended that closed its end: see `WorkerDied`."""

    def call(self, message: bytes, seconds: float | None = None) -> bytes:
        """What it answers within so many seconds (None: however long). Raises WorkerDied, and what
        the call raised there."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        # Writing, too, waits for a process that has stopped.
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
            raise _error_of(json.loads(said[1:]))
        return said[1:]


class LocalWorker(Worker):
    """A process that we start. It calls `target`, `module:function`, with the bytes `setup`, and
    then what that has returned with the bytes of every call. With `group`, processes that it has
    started are killed with it."""

    def __init__(self, name: str, target: str, setup: bytes, *, group: bool = False) -> None:
        connection, theirs = Pipe()
        super().__init__(name, connection, setup)
        self._group = group
        with theirs:
            self._process = start(target, theirs.fileno())

    @property
    def pid(self) -> int:
        """The process's number."""
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
        # Else it has closed its end, and lives on.
        return self._process.end() if status is None else status


def start(target: str, channel: int) -> ChildProcess:
    """A new interpreter with `target`, which answers calls over the file `channel` until that is
    closed at the other end, or this process ends."""
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), target]
    # By a lifeline: a thread that starts one may end before it, and a worker sees its parent's
    # death also while it computes.
    return ChildProcess(command, "lifeline", channel=channel)


def describe(error: BaseException, trace: str) -> bytes:
    """An error as a worker sends it."""
    notes = list(getattr(error, "__notes__", ()))
    kind, name = type(error), type(error).__name__
    known = {"type": name, "module": kind.__module__, "text": str(error), "notes": notes}
    return json.dumps(known | {"trace": trace}).encode()


def _error_of(said: dict[str, Any]) -> Exception:
    """An error that was raised in a worker, of the same type where that is Python's
    or ours."""
    kind, text = None, said["text"]
    if said["module"] == "builtins" or said["module"].startswith("rloo."):
        kind = getattr(importlib.import_module(said["module"]), said["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind, text = RuntimeError, f"{said['type']}: {text}"
    try:
        error: Exception = kind(text)
    except TypeError:  # UnicodeDecodeError and the like take more
        error = RuntimeError(f"{said['type']}: {text}")
    for note in said["notes"]:
        error.add_note(note)
    error.add_note(f"in another process:\n{said['trace'].rstrip()}")
    return error
