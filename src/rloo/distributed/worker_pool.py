"""Threads that have workers do jobs, and futures that tell of what comes of them."""

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

# Waits are cut into turns, so that signals are handled.
_TURN_SECONDS = 0.2
# How often in a row a job may cost a process before it is given up.
TRIES = 3


def wait_result(future: Future[T]) -> T:
    """What comes of it; every call behind it has a deadline. What it raises is of the run."""
    while not wait_for([future], _TURN_SECONDS).done:
        pass
    try:
        return future.result()
    except Exception as error:
        error.in_run = True  # type: ignore[attr-defined]  # no fault of the input
        raise


def chain_future(told: Future[T], other: Future[S], take: Callable[[S], T]) -> None:
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


class WorkerPool:
    """Workers that do jobs in the order in which they come, each one job at a time: `make` finds
    one when there is something to do, and again where one is lost. A job that was under way then is
    done again, by whichever worker is free, as often as `submit` says. Close it to end them; the
    end of this process does the same."""

    def __init__(self, size: int, make: Callable[[], Worker]) -> None:
        self.size = size
        self._shared = _Shared(make)
        self.close = weakref.finalize(self, self._shared.close)
        for _ in range(size):
            # It does not keep the crew alive.
            threading.Thread(target=self._shared.work, daemon=True).start()

    def submit(
        self, job: Callable[[Worker], T], *, first: bool = False, tries: int = TRIES
    ) -> Future[T]:
        """Have a worker do a job; `first` before all that wait. It may cost `tries` workers."""
        future: Future[T] = Future()
        with self._shared.changed:
            if self._shared.closed:
                raise RuntimeError("the crew has been closed")
            self._shared.put(_Job(future, job, tries), first=first)
        return future

    def cancel_pending(self) -> None:
        """Cancel the jobs that no worker has begun."""
        self._shared.cancel_pending()

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


@dataclass(slots=True)
class _Job:
    future: Future[Any]
    do: Callable[[Worker], Any]
    most_tries: int
    tries: int = 0


class _Shared:
    """What the threads of a crew share."""

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
            if worker is not None and not worker.is_alive:  # it died between two jobs
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
                del result  # it would be kept until the next one
            del job
        if worker is not None:
            worker.end()

    def _something_to_do(self) -> bool:
        """Wait for a job; False once the crew is closed."""
        with self.changed:
            while not self.jobs and not self.closed:
                self.changed.wait(60.0)
            return not self.closed

    def _next(self) -> _Job | None:
        """The next job, None where another thread has taken the last one."""
        with self.changed:
            while self.jobs:
                job = self.jobs.popleft()
                if job.tries > 0 or job.future.set_running_or_notify_cancel():
                    self.begun[id(job.future)] = time.monotonic()
                    return job
        return None

    def _again(self, job: _Job, error: WorkerDied) -> None:
        """Have a job done again whose worker was lost, if it may be."""
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
        """A worker that was found. Where none is, and there is no other, the next job says why."""
        try:
            worker = self.make()
        except Exception as error:
            with self.changed:
                if self.workers or self.closed:
                    self.changed.wait(1.0)  # others do what there is to do
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
        for job in waiting:  # what is called then may begin others
            if not job.future.cancel():  # its worker was lost, and it was to be done again
                job.future.set_exception(RuntimeError("it was given up"))

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            workers = list(self.workers)
        self.cancel_pending()
        for worker in workers:
            worker.kill()
