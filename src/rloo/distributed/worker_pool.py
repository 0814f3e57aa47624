"""Pools of workers. A pool has a queue of jobs. `WorkerPool` has a thread per worker.

Remote workers have no threads: see `rloo.distributed.remote_pool`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, overload

from rloo.distributed.worker_process import Worker, WorkerDied

S = TypeVar("S")
T = TypeVar("T")
# The calls of a job. It yields a message and a deadline in seconds (None: no deadline), receives
# the answer, and returns its result. It gets the errors of `Worker.call`.
Calls = Generator[tuple[bytes, float | None], bytes, T]

# A wait is a loop of short waits of this length, so that Python handles signals.
_TURN_SECONDS = 0.2
# A job fails after this many of its workers were lost.
TRIES = 3


def wait_result(future: Future[T]) -> T:
    """Wait for a future and return its result. The wait has no deadline, so the calls that the
    future depends on must have deadlines. An exception of the future is marked with `in_run`."""
    while not wait_for([future], _TURN_SECONDS).done:
        pass
    try:
        return future.result()
    except Exception as error:
        error.in_run = True  # type: ignore[attr-defined]  # not an error in the input
        raise


def chain_future(told: Future[T], other: Future[S], take: Callable[[S], T]) -> None:
    """When `other` is done, set `told` to `take(result)`, or to the exception of `other`. If
    `other` is cancelled, `told` gets a RuntimeError. No other code may set `told`."""

    def tell(done: Future[S]) -> None:
        try:
            if done.cancelled():
                raise RuntimeError("it was given up")
            told.set_result(take(done.result()))
        except BaseException as error:  # raised in the thread that waits for `told`
            told.set_exception(error)

    other.add_done_callback(tell)


class Pool:
    """Workers that run jobs in the order of submission. Each worker runs one job at a time. The job
    of a lost worker is retried on any free worker, as often as `submit` allows. The workers end
    with `close` or with this process."""

    close: Callable[[], object]

    def __init__(self, size: int, queue: JobQueue) -> None:
        self.size = size
        self._queue = queue

    def submit(
        self, job: Callable[[Any], Calls[T]], *, first: bool = False, tries: int = TRIES
    ) -> Future[T]:
        """Queue a job, and return the future of the job's result. `job` returns its calls to the
        worker. `first` puts the job before all waiting jobs. The job fails after `tries` lost
        workers."""
        return self._queue.submit(job, first=first, tries=tries)

    def cancel_pending(self) -> None:
        """Cancel the jobs that no worker has started."""
        self._queue.cancel_pending()

    @property
    def lost(self) -> int:
        """The number of workers lost so far."""
        return self._queue.lost

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        with self._queue.changed:
            return [worker.pid for worker in self._queue.workers]

    def busy_seconds(self) -> float:
        """The seconds that workers have spent on jobs so far, summed over workers."""
        with self._queue.changed:
            begun, now = self._queue.begun, time.monotonic()
            return self._queue.busy + sum(now - start for start in begun.values())


class WorkerPool(Pool):
    """A pool with a thread per worker. `make` is called for a worker when there are jobs, and again
    when a worker is lost."""

    def __init__(self, size: int, make: Callable[[], Worker]) -> None:
        shared = _Threads(make)
        super().__init__(size, shared)
        self.close: Callable[[], object] = weakref.finalize(self, shared.close)
        for _ in range(size):
            # A thread refers to `shared` only, so the pool can be garbage collected.
            threading.Thread(target=shared.work, daemon=True).start()

    @overload
    def submit(
        self, job: Callable[[Any], Calls[T]], *, first: bool = ..., tries: int = ...
    ) -> Future[T]:
        """See `Pool`."""

    @overload
    def submit(
        self, job: Callable[[Worker], T], *, first: bool = ..., tries: int = ...
    ) -> Future[T]:
        """A job that calls the worker itself, and returns its result."""

    def submit(
        self, job: Callable[[Any], Any], *, first: bool = False, tries: int = TRIES
    ) -> Future[Any]:
        """See the two signatures."""
        return super().submit(job, first=first, tries=tries)


def call_once(message: bytes, seconds: float | None, worker: object) -> Calls[bytes]:
    """A job of one call, which returns the answer."""
    return (yield message, seconds)


def _run_calls(calls: Calls[T], worker: Worker) -> T:
    """Make the calls of a job, and return its result."""
    step = partial(next, calls)
    while True:
        try:
            message, seconds = step()
        except StopIteration as ended:
            return ended.value
        try:
            step = partial(calls.send, worker.call(message, seconds))
        except Exception as error:
            step = partial(calls.throw, error)


@dataclass(slots=True)
class Job:
    """A job of a queue, and how often its worker was lost."""

    future: Future[Any]
    do: Callable[[Any], Any]
    most_tries: int
    tries: int = 0


class JobQueue:
    """The jobs and workers of a pool. Thread-safe."""

    def __init__(self) -> None:
        self.changed: threading.Condition = threading.Condition()
        self.jobs: deque[Job] = deque()
        self.workers: list[Any] = []
        self.begun: dict[int, float] = {}
        self.busy: float = 0.0
        self.lost: int = 0
        self.closed: bool = False

    def submit(self, do: Callable[[Any], Any], *, first: bool, tries: int) -> Future[Any]:
        """See `Pool.submit`."""
        future: Future[Any] = Future()
        with self.changed:
            if self.closed:
                raise RuntimeError("the crew has been closed")
            self.put(Job(future, do, tries), first=first)
        return future

    def put(self, job: Job, *, first: bool) -> None:
        """Add a job; the caller holds the lock."""
        (self.jobs.appendleft if first else self.jobs.append)(job)
        self.changed.notify()

    def take(self) -> Job | None:
        """The next job, which counts as begun; None if there is none."""
        with self.changed:
            while self.jobs:
                job = self.jobs.popleft()
                if job.tries > 0 or job.future.set_running_or_notify_cancel():
                    self.begun[id(job.future)] = time.monotonic()
                    return job
        return None

    def again(self, job: Job, error: WorkerDied) -> None:
        """Queue the job of a lost worker again. After its last try the job fails."""
        job.tries += 1
        with self.changed:
            if job.tries < job.most_tries and not self.closed:
                self.put(job, first=True)
                return
        job.future.set_exception(error)

    def count(self, job: Job) -> None:
        """Count the time of a job, which its worker runs no longer."""
        with self.changed:
            self.busy += time.monotonic() - self.begun.pop(id(job.future))

    def cancel_pending(self) -> None:
        """Cancel the jobs that no worker has started."""
        with self.changed:
            waiting = list(self.jobs)
            self.jobs.clear()
        for job in waiting:  # outside of the lock: callbacks may submit jobs
            if not job.future.cancel():  # a job that waits for a retry counts as running
                job.future.set_exception(RuntimeError("it was given up"))


class _Threads(JobQueue):
    """The state that the threads of a pool share."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        super().__init__()
        self.make = make

    def work(self) -> None:
        """Run jobs until the pool is closed."""
        worker: Worker | None = None
        while self._something_to_do():
            if worker is not None and not worker.is_alive:  # the worker died between two jobs
                self._dismiss(worker)
                worker = None
            if worker is None and (worker := self._hire()) is None:
                continue
            if (job := self.take()) is None:
                continue
            try:
                result = job.do(worker)
                if isinstance(result, Generator):
                    result = _run_calls(result, worker)
            except WorkerDied as error:
                self._dismiss(worker)
                worker = None
                self.count(job)
                self.again(job, error)
            except BaseException as error:
                self.count(job)
                job.future.set_exception(error)
            else:
                self.count(job)
                job.future.set_result(result)
                del result  # or it stays in memory until the next job
            del job
        if worker is not None:
            worker.end()

    def close(self) -> None:
        """End the workers."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            workers = list(self.workers)
        self.cancel_pending()
        for worker in workers:
            worker.kill()

    def _something_to_do(self) -> bool:
        """Wait for a job; False once the pool is closed."""
        with self.changed:
            while not self.jobs and not self.closed:
                self.changed.wait(60.0)
            return not self.closed

    def _hire(self) -> Worker | None:
        """A new worker, or None. If no worker is left, the next job fails with the error."""
        try:
            worker = self.make()
        except Exception as error:
            with self.changed:
                if self.workers or self.closed:
                    self.changed.wait(1.0)  # the other workers run the jobs
                    return None
            if (job := self.take()) is not None:
                self.count(job)
                job.future.set_exception(error)
            return None
        with self.changed:
            if not self.closed:
                self.workers.append(worker)
                return worker
        worker.end()
        return None

    def _dismiss(self, worker: Worker) -> None:
        worker.end()
        with self.changed:
            self.lost += not self.closed
            self.workers.remove(worker)
