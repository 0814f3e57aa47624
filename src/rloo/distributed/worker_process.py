"""Processes of ours beside a run: each answers one call after the other, and ends when we do.

A worker is a new interpreter, not a fork: what threads of this process hold is none of its. What
it is sent and what it answers are bytes, over a pair of sockets that only the two have. Those that
others have started, on whatever machine, are in `rloo.distributed.worker_registry`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

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
            raise WorkerDied(self.name, _how(status), status) from error
        finally:
            timer.cancel()
        if said[:1] == FAILURE:
            raise _error_of(json.loads(said[1:]))
        return said[1:]


class LocalWorker(Worker):
    """A process that we start. It calls `target`, `module:function`, with the bytes `setup`, and
    then what that has returned with the bytes of every call."""

    def __init__(self, name: str, target: str, setup: bytes) -> None:
        connection, theirs = Pipe()
        super().__init__(name, connection, setup)
        # It reads here only that we are gone, also while it computes.
        read, write = os.pipe()
        self._lifeline = open(write, "wb", buffering=0)  # noqa: SIM115  # until `end`
        self._process = start(target, theirs.fileno(), read)
        os.close(read)
        theirs.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def kill(self) -> None:
        """See `Worker`."""
        self._process.kill()

    def end(self) -> None:
        """See `Worker`."""
        self._process.kill()
        self._process.wait()
        with self._closing:
            self._disconnect()
            self._lifeline.close()

    def _status(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(10.0)
        self._process.kill()  # it has closed its end, and lives on
        return self._process.wait()


def start(target: str, channel: int, lifeline: int) -> subprocess.Popen[bytes]:
    """A new interpreter with `target`, which answers calls over the file `channel` until that, or
    `lifeline`, is closed at the other end."""
    path = json.dumps(sys.path)
    command = [sys.executable, "-c", _PROGRAM, path, target, str(channel), str(lifeline)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(channel, lifeline),
        start_new_session=True,  # a terminal's Ctrl-C is ours alone
    )


def _how(status: int | None) -> str:
    if status is None:
        return "is gone, or cannot be reached any more"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


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
