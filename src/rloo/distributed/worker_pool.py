"""A pool of workers. One thread per worker runs jobs and sets the jobs' futures."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, TypeVar

from rloo.distributed.worker_process import Worker, WorkerDied

S = TypeVar("S")
T = TypeVar("T")

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


class WorkerPool:
    """Workers that run jobs in the order of submission. Each worker runs one job at a time. `make`
    is called for a worker when there are jobs, and again when a worker is lost. The job of a lost
    worker is retried on any free worker, as often as `submit` allows. The workers end with `close`
    or with this process."""

    def __init__(self, size: int, make: Callable[[], Worker]) -> None:
        self.size = size
        self._shared = _Shared(make)
        self.close = weakref.finalize(self, self._shared.close)
        for _ in range(size):
            # A thread refers to `_shared` only, so the pool can be garbage collected.
            threading.Thread(target=self._shared.work, daemon=True).start()

    def submit(
        self, job: Callable[[Worker], T], *, first: bool = False, tries: int = TRIES
    ) -> Future[T]:
        """Queue a job and return its future; `first` puts it before all waiting jobs. The job fails
        after `tries` lost workers."""
        future: Future[T] = Future()
        with self._shared.changed:
            if self._shared.closed:
                raise RuntimeError("the crew has been closed")
            self._shared.put(_Job(future, job, tries), first=first)
        return future

    def cancel_pending(self) -> None:
        """Cancel the jobs that no worker has started."""
        self._shared.cancel_pending()

    @property
    def lost(self) -> int:
        """The number of workers lost so far."""
        return self._shared.lost

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        with self._shared.changed:
            return [worker.pid for worker in self._shared.workers]

    def busy_seconds(self) -> float:
        """The seconds that workers have spent on jobs so far, summed over workers."""
        with self._shared.changed:
            begun, now = self._shared.begun, time.monotonic()
            return self._shared.busy + sum(now - start for start in begun.values())


@dataclass(slots=True)
class _Job:
    future: Future[Any]
    do: Callable[[Worker], Any]
    most_tries: int
    tries: int = 0


class _Shared:
    """The state that the threads of a pool share."""

    def __init__(self, make: Callable[[], Worker]) -> None:
        self.make = make
        self.changed = threading.Condition()
        self.jobs: deque[_Job] = deque()
        self.workers: list[Worker] = []
        self.begun: dict[int, float] = {}
        self.busy, self.lost, self.closed = 0.0, 0, False

    def put(self, job: _Job, *, first: bool) -> None:
        (self.jobs.appendleft if first else self.jobs.append)(job)
        self.changed.notify()

    def work(self) -> None:
        worker: Worker | None = None
        while self._something_to_do():
            if worker is not None and not worker.is_alive:  # the worker died between two jobs
                self._dismiss(worker)
                worker = None
            if worker is None and (worker := self._hire()) is None:
                continue
            if (job := self._next()) is None:
                continue
            try:
                result = job.do(worker)
            except WorkerDied as error:
                self._dismiss(worker)
                worker = None
                self._count(job.future)
                self._again(job, error)
            except BaseException as error:
                self._count(job.future)
                job.future.set_exception(error)
            else:
                self._count(job.future)
                job.future.set_result(result)
                del result  # or it stays in memory until the next job
            del job
        if worker is not None:
            worker.end()

    def _something_to_do(self) -> bool:
        """Wait for a job; False once the pool is closed."""
        with self.changed:
            while not self.jobs and not self.closed:
                self.changed.wait(60.0)
            return not self.closed

    def _next(self) -> _Job | None:
        """The next job; None if another thread has taken the last job."""
        with self.changed:
            while self.jobs:
                job = self.jobs.popleft()
                if job.tries > 0 or job.future.set_running_or_notify_cancel():
                    self.begun[id(job.future)] = time.monotonic()
                    return job
        return None

    def _again(self, job: _Job, error: WorkerDied) -> None:
        """Queue the job of a lost worker again. After its last try the job fails."""
        job.tries += 1
        with self.changed:
            if job.tries < job.most_tries and not self.closed:
                self.put(job, first=True)
                return
        job.future.set_exception(error)

    def _count(self, future: Future[Any]) -> None:
        with self.changed:
            self.busy += time.monotonic() - self.begun.pop(id(future))

    def _hire(self) -> Worker | None:
        """A new worker, or None. If no worker is left, the next job fails with the error."""
        try:
            worker = self.make()
        except Exception as error:
            with self.changed:
                if self.workers or self.closed:
                    self.changed.wait(1.0)  # the other workers run the jobs
                    return None
            if (job := self._next()) is not None:
                self._count(job.future)
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

    def cancel_pending(self) -> None:
        with self.changed:
            waiting = list(self.jobs)
            self.jobs.clear()
        for job in waiting:  # outside of the lock: callbacks may submit jobs
            if not job.future.cancel():  # a job that waits for a retry counts as running
                job.future.set_exception(RuntimeError("it was given up"))

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            workers = list(self.workers)
        self.cancel_pending()
        for worker in workers:
            worker.kill()
