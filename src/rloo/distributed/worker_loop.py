"""The thread that runs the jobs of all remote workers. A subclass has the connections to the
workers: by ZeroMQ (`rloo.distributed.worker_server`), or by Ray."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from typing import Any

from rloo.distributed.child_process import describe_status
from rloo.distributed.remote_pool import RemoteJobs, RemotePool, RemoteWorker
from rloo.distributed.worker_process import WorkerDied

# The longest wait for a message.
TURN_SECONDS = 0.2
_CLOSE_SECONDS = 10.0
_NOT_NEEDED = "is not needed any more"


class WorkerLoop(ABC):
    """The connected workers, and the pools that they work for. See `Links` for `wake`, `hire`,
    `send` and `lose`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._is_closed = False
        self._pools: list[RemoteJobs] = []
        self._members: dict[bytes, RemoteWorker] = {}
        self._waiting: defaultdict[str, deque[RemoteWorker]] = defaultdict(deque)
        self._gone: list[RemoteWorker] = []
        self._next_check = 0.0

    @abstractmethod
    def wake(self) -> None:
        """End the wait of `_communicate`. Thread-safe."""

    @abstractmethod
    def hint(self, kind: str) -> str:
        """How a user gets workers of this kind."""

    @abstractmethod
    def send(self, worker: RemoteWorker, *parts: bytes) -> None:
        """Send a message. A worker that is gone is added to `_gone`."""

    @abstractmethod
    def _disconnect(self, worker: RemoteWorker) -> None:
        """End the connection to a worker."""

    @abstractmethod
    def _communicate(self, seconds: float) -> None:
        """Wait at most `seconds` for a message, and process all that have come."""

    @abstractmethod
    def _stop(self) -> None:
        """Close all connections, at the end of the thread."""

    def pool(self, kind: str, size: int, setup: bytes, seconds: float) -> RemotePool:
        """See `Registry`."""
        jobs = RemoteJobs(kind, size, setup, seconds, self)
        with self._lock:
            is_closed = self._is_closed
            self._pools.append(jobs)
        if is_closed:
            jobs.end(_NOT_NEEDED)
        else:
            self._start()
        return RemotePool(size, jobs)

    def members(self) -> list[dict[str, Any]]:
        """See `Registry`."""
        with self._lock:
            return [worker.hello.shown() for worker in self._members.values()]

    def close(self) -> None:
        """Disconnect all workers, fail all jobs, and end the thread."""
        with self._lock:
            self._is_closed = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def hire(self, kind: str) -> RemoteWorker | None:
        """See `Links`."""
        return self._waiting[kind].popleft() if self._waiting[kind] else None

    def lose(self, worker: RemoteWorker, error: WorkerDied) -> None:
        """See `Links`."""
        if worker.gone:
            return
        worker.gone = True
        self._disconnect(worker)
        with self._lock:
            self._members.pop(worker.identity, None)
        if worker in self._waiting[worker.hello.kind]:
            self._waiting[worker.hello.kind].remove(worker)
        if worker.jobs is not None:
            worker.jobs.drop(worker, error)

    def _start(self) -> None:
        with self._lock:
            if self._thread.ident is None and not self._is_closed:
                self._thread.start()

    def _admit(self, worker: RemoteWorker) -> None:
        """Add a worker, which is free for a pool."""
        self._waiting[worker.hello.kind].append(worker)
        with self._lock:
            self._members[worker.identity] = worker

    def _run(self) -> None:
        fact = _NOT_NEEDED
        try:
            while not self._is_closed:
                self._communicate(0.0 if self._gone else TURN_SECONDS)
                # After the messages: a worker may have answered before it left.
                gone, self._gone = self._gone, []
                for worker in gone:
                    self.lose(worker, WorkerDied(worker.name, describe_status(None)))
                self._dispatch()
        except BaseException as error:
            fact = f"cannot be reached: {error!r}"
            raise
        finally:
            with self._lock:
                self._is_closed = True
                self._members.clear()
            for jobs in [*self._pools]:
                jobs.end(fact)
            self._stop()

    def _dispatch(self) -> None:
        now = time.monotonic()
        is_due = now >= self._next_check
        for jobs in [*self._pools]:
            if is_due:
                jobs.check_deadlines(now)
            is_closed = jobs.closed  # before `dispatch`, which then disconnects the workers
            jobs.dispatch()
            if is_closed:
                self._pools.remove(jobs)
        if is_due:
            self._next_check = now + TURN_SECONDS
