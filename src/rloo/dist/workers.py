"""Processes of ours beside a run: each answers one call after the other, and ends when we do.

A worker is a new interpreter, not a fork: what threads of this process hold is none of its. What
it is sent and what it answers are bytes, over a pair of sockets that only the two have.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

# Waits are cut into turns, so that signals are handled.
_TURN_SECONDS = 0.2
# How often in a row a job may cost a process before it is given up.
TRIES = 3
ANSWER, FAILURE = b"a", b"f"
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rloo.dist.worker import main; main(sys.argv[2], *map(int, sys.argv[3:]))"
)


class WorkerLost(OSError):
    """A worker has died, or did not answer in time and was ended. `status` is that with which it
    ended by itself, minus a signal's number, None where we have ended it."""

    def __init__(self, name: str, fact: str, status: int | None = None) -> None:
        super().__init__(f"the process {name} {fact}")
        self.status = status


class Worker:
    """A process that calls `target`, `module:function`, with the bytes `setup`, and then what that
    has returned with the bytes of every call."""

    def __init__(self, name: str, target: str, setup: bytes) -> None:
        self.name = name
        self._connection, theirs = Pipe()
        # It reads here only that we are gone, also while it computes.
        read, write = os.pipe()
        self._lifeline = open(write, "wb", buffering=0)  # noqa: SIM115  # until `end`
        path = json.dumps(sys.path)
        command = [sys.executable, "-c", _PROGRAM, path, target, str(theirs.fileno()), str(read)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), read),
            start_new_session=True,  # a terminal's Ctrl-C is ours alone
        )
        os.close(read)
        theirs.close()
        self._setup: bytes | None = setup

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def call(self, message: bytes, seconds: float | None = None) -> bytes:
        """What it answers within so many seconds (None: however long). Raises WorkerLost, and what
        the call raised there."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

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
            status = self._ended()
            if late.is_set():
                raise WorkerLost(self.name, f"did not answer within {seconds:g} s") from error
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise WorkerLost(self.name, how, status) from error
        finally:
            timer.cancel()
        if said[:1] == FAILURE:
            raise _error_of(json.loads(said[1:]))
        return said[1:]

    def _ended(self) -> int:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(10.0)
        self._process.kill()  # it has closed its end, and lives on
        return self._process.wait()

    def kill(self) -> None:
        """Have the process end; a call under way raises WorkerLost. For any thread."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, if it lives, and close what led to it. For any thread, also twice."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._connection.close()
        self._lifeline.close()


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


def result_of(future: Future[T]) -> T:
    """What comes of it; every call behind it has a deadline. What it raises is of the run."""
    while not wait_for([future], _TURN_SECONDS).done:
        pass
    try:
        return future.result()
    except Exception as error:
        error.in_run = True  # type: ignore[attr-defined]  # no fault of the input
        raise


def follow(told: Future[T], other: Future[S], take: Callable[[S], T]) -> None:
    """Have `told`, which nobody else sets, tell what `take` makes of the other's result, or what
    that raises; where it is cancelled, RuntimeError."""

    def tell(done: Future[S]) -> None:
        try:
            if done.cancelled():
                raise RuntimeError("it was given up")
            told.set_result(take(done.result()))
        except BaseException as error:  # raised by who waits
            told.set_exception(error)

    other.add_done_callback(tell)


class Crew:
    """Workers that do jobs in the order in which they come, each one job at a time: `make` starts
    one when there is something to do, and again where one is lost. A job that was under way then is
    done again, at most TRIES times in a row. Close it to end them; the end of this process does the
    same."""

    def __init__(self, size: int, make: Callable[[], Worker]) -> None:
        self.size = size
        self._shared = _Shared(make)
        self.close = weakref.finalize(self, self._shared.close)
        for _ in range(size):
            # It does not keep the crew alive.
            threading.Thread(target=self._shared.work, daemon=True).start()

    def begin(self, job: Callable[[Worker], T], *, first: bool = False) -> Future[T]:
        """Have a worker do a job; `first` before all that wait."""
        future: Future[T] = Future()
        with self._shared.changed:
            if self._shared.closed:
                raise RuntimeError("the crew has been closed")
            (self._shared.jobs.appendleft if first else self._shared.jobs.append)((future, job))
            self._shared.changed.notify()
        return future

    def forget(self) -> None:
        """Cancel the jobs that no worker has begun."""
        self._shared.forget()

    @property
    def lost(self) -> int:
        """How many workers were lost so far."""
        return self._shared.lost

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        with self._shared.changed:
            return [worker.pid for worker in self._shared.workers]

    def busy_seconds(self) -> float:
        """For how long workers have had something to do so far, all together."""
        with self._shared.changed:
            begun, now = self._shared.begun, time.monotonic()
            return self._shared.busy + sum(now - start for start in begun.values())


class _Shared:
    """What the threads of a crew share."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.make = make
        self.changed = threading.Condition()
        self.jobs: deque[tuple[Future[Any], Callable[[Worker], Any]]] = deque()
        self.workers: list[Worker] = []
        self.begun: dict[int, float] = {}
        self.busy, self.lost, self.closed = 0.0, 0, False

    def work(self) -> None:
        held: list[Worker] = []
        while True:
            with self.changed:
                while not self.jobs and not self.closed:
                    self.changed.wait(60.0)
                if self.closed:
                    break
                future, job = self.jobs.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
                self.begun[id(future)] = time.monotonic()
            try:
                result = self._do(held, job)
            except BaseException as error:
                self._count(future)
                future.set_exception(error)
            else:
                self._count(future)
                future.set_result(result)
            # Else a job's result would be kept until the next one.
            del future, job
        for worker in held:
            worker.end()

    def _count(self, future: Future[Any]) -> None:
        with self.changed:
            self.busy += time.monotonic() - self.begun.pop(id(future))

    def _do(self, held: list[Worker], job: Callable[[Worker], T]) -> T:
        """Do a job with the worker that is held, or a new one, which is held from then on."""
        for tries in range(1, TRIES + 1):
            if not held:
                held.append(self._hire())
            try:
                return job(held[0])
            except WorkerLost:
                self._dismiss(held.pop())
                if tries == TRIES or self.closed:
                    raise
        raise AssertionError("unreachable")

    def _hire(self) -> Worker:
        worker = self.make()
        with self.changed:
            self.workers.append(worker)
            if not self.closed:
                return worker
        self._dismiss(worker)
        raise WorkerLost(worker.name, "is not needed any more")

    def _dismiss(self, worker: Worker) -> None:
        worker.end()
        with self.changed:
            self.lost += not self.closed
            if worker in self.workers:
                self.workers.remove(worker)

    def forget(self) -> None:
        with self.changed:
            waiting = list(self.jobs)
            self.jobs.clear()
        for future, _ in waiting:  # what is called then may begin others
            future.cancel()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            workers = list(self.workers)
        self.forget()
        for worker in workers:
            worker.kill()
