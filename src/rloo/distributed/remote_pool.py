"""Pools of workers that are started outside of the run.

The thread of a `WorkerLoop` runs the jobs of all such pools. A job that waits for an answer is
a suspended generator, without a thread.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rloo.distributed.child_process import describe_status
from rloo.distributed.worker_pool import Calls, Job, JobQueue, Pool, WorkerPool
from rloo.distributed.worker_process import FAILURE, LocalWorker, WorkerDied, error_of

# The function that serves each kind of worker.
KINDS = {"sample": "rloo.engines.engine_worker:serve", "score": "rloo.rewards.reward_workers:serve"}


@dataclass(frozen=True, slots=True)
class Registration:
    """The first message of a worker, and the time of its connection."""

    kind: str
    host: str
    pid: int
    since: float

    def shown(self) -> dict[str, Any]:
        """The registration as JSON values."""
        return {"role": self.kind, "host": self.host, "pid": self.pid, "since": self.since}


@dataclass(eq=False)
class RemoteWorker:
    """A connected worker, and the job that it runs. `identity` is the address of its messages.
    `setup` is sent with the first call."""

    identity: bytes
    hello: Registration
    jobs: RemoteJobs | None = None
    name: str = ""
    setup: bytes | None = None
    job: Job | None = None
    calls: Calls[Any] | None = None
    # The deadline of the call in seconds, and its time.
    seconds: float | None = None
    deadline: float | None = None
    gone: bool = False

    @property
    def pid(self) -> int:
        """The process id on the worker's machine."""
        return self.hello.pid


class Links(Protocol):
    """The connections of the workers. Only `wake` is thread-safe."""

    def wake(self) -> None:
        """Call `dispatch` of all pools soon."""

    def hire(self, kind: str) -> RemoteWorker | None:
        """A connected worker of this kind that belongs to no pool."""

    def send(self, worker: RemoteWorker, *parts: bytes) -> None:
        """Send a message. If the worker is gone, its pool is informed."""

    def lose(self, worker: RemoteWorker, error: WorkerDied) -> None:
        """Disconnect a worker, and inform its pool."""

    def hint(self, kind: str) -> str:
        """How a user gets workers of this kind."""


class Registry(Protocol):
    """The workers of a run that are started outside of the run: a `WorkerRegistry` (ZeroMQ), or the
    actors of Ray."""

    def open(self) -> None:
        """Start to accept workers. Raises OSError if that is impossible."""

    def pool(self, kind: str, size: int, setup: bytes, seconds: float) -> RemotePool:
        """A pool of workers of this kind: see `RemotePool`."""

    def members(self) -> list[dict[str, Any]]:
        """The connected workers: kind, host, process id, and time of connection."""

    def finish(self) -> None:
        """Mark the run as over."""

    def close(self) -> None:
        """Disconnect all workers; may be repeated."""


class RemotePool(Pool):
    """`size` remote workers of a kind, which first receive the bytes `setup`. If no worker has
    connected within `seconds`, all waiting jobs fail with WorkerDied."""

    def __init__(self, size: int, jobs: RemoteJobs) -> None:
        super().__init__(size, jobs)
        self.close: Callable[[], object] = weakref.finalize(self, jobs.close)


class RemoteJobs(JobQueue):
    """The state of a `RemotePool`. The thread of a `WorkerLoop` calls `dispatch`, `answered`,
    `check_deadlines`, `drop` and `end`."""

    lost: int

    def __init__(self, kind: str, size: int, setup: bytes, seconds: float, links: Links) -> None:
        super().__init__()
        self.kind = kind
        self._size, self._setup, self._seconds, self._links = size, setup, seconds, links
        self._idle: deque[RemoteWorker] = deque()
        self._without_worker_since: float | None = None
        # The reason why no worker can connect any more.
        self._end: str | None = None

    def submit(self, do: Callable[[Any], Any], *, first: bool, tries: int) -> Future[Any]:
        """See `Pool.submit`."""
        future = super().submit(do, first=first, tries=tries)
        if self._end is not None:
            self._fail_waiting(self._end)
        return future

    def put(self, job: Job, *, first: bool) -> None:
        """See `JobQueue`."""
        super().put(job, first=first)
        self._links.wake()

    def close(self) -> None:
        """Give up all jobs, and disconnect the workers."""
        with self.changed:
            self.closed = True
        self.cancel_pending()
        self._links.wake()

    def dispatch(self) -> None:
        """Start jobs on free workers."""
        if self.closed:
            for worker in list(self.workers):
                self._links.lose(worker, WorkerDied(worker.name, describe_status(None)))
            return
        while self.jobs and (worker := self._free_worker()) is not None:
            if (job := self.take()) is None:
                self._idle.append(worker)
                break
            worker.job, worker.calls = job, None
            self._advance(worker, partial(self._begin, worker, job))
        if not self.jobs or self.workers:
            self._without_worker_since = None
        elif self._without_worker_since is None:
            self._without_worker_since = time.monotonic()
        elif time.monotonic() - self._without_worker_since > self._seconds:
            self._without_worker_since = None
            hint = self._links.hint(self.kind)
            self._fail_waiting(f"has not come within {self._seconds:g} s ({hint})")

    def answered(self, worker: RemoteWorker, answer: bytes) -> None:
        """Continue the worker's job with an answer."""
        if (calls := worker.calls) is None or worker.gone:
            return
        if answer[:1] == FAILURE:
            self._advance(worker, lambda: calls.throw(error_of(json.loads(answer[1:]))))
        else:
            self._advance(worker, lambda: calls.send(answer[1:]))

    def check_deadlines(self, now: float) -> None:
        """Disconnect the workers whose calls are late."""
        for worker in list(self.workers):
            if worker.deadline is not None and worker.deadline <= now:
                fact = f"did not answer within {worker.seconds:g} s"
                self._links.lose(worker, WorkerDied(worker.name, fact))

    def drop(self, worker: RemoteWorker, error: WorkerDied) -> None:
        """Take a lost worker out of the pool. Its job gets the error."""
        with self.changed:
            self.lost += not self.closed
            self.workers.remove(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if (calls := worker.calls) is not None:
            self._advance(worker, lambda: calls.throw(error))

    def end(self, fact: str) -> None:
        """Fail all jobs, now and later: no worker can connect any more, because of `fact`."""
        self._end = fact
        for worker in list(self.workers):
            worker.gone = True
            self.drop(worker, WorkerDied(worker.name, fact))
        self._fail_waiting(fact)

    def _begin(self, worker: RemoteWorker, job: Job) -> tuple[bytes, float | None]:
        worker.calls = job.do(worker)
        return next(worker.calls)

    def _free_worker(self) -> RemoteWorker | None:
        if self._idle:
            return self._idle.popleft()
        if len(self.workers) == self._size or (worker := self._links.hire(self.kind)) is None:
            return None
        worker.jobs, worker.setup = self, self._setup
        place = f"process {worker.pid} on {worker.hello.host}"
        worker.name = f"that {self.kind}s ({place})"
        with self.changed:
            self.workers.append(worker)
        return worker

    def _advance(
        self, worker: RemoteWorker, step: Callable[[], tuple[bytes, float | None]]
    ) -> None:
        """Run a worker's job up to its next call, or to its end."""
        job = worker.job
        assert job is not None
        try:
            message, seconds = step()
            if worker.gone:  # the job has caught the error, and calls again
                raise WorkerDied(worker.name, describe_status(None))
        except StopIteration as ended:
            self._finish(worker, job)
            job.future.set_result(ended.value)
        except WorkerDied as error:
            self._finish(worker, job)
            self.again(job, error)
        except BaseException as error:  # raised in the thread that waits for the future
            self._finish(worker, job)
            job.future.set_exception(error)
        else:
            worker.seconds = seconds
            worker.deadline = None if seconds is None else time.monotonic() + seconds
            setup, worker.setup = worker.setup, None
            self._links.send(worker, *([message] if setup is None else [setup, message]))

    def _finish(self, worker: RemoteWorker, job: Job) -> None:
        self.count(job)
        worker.job = worker.calls = worker.deadline = None
        if not worker.gone:
            self._idle.append(worker)

    def _fail_waiting(self, fact: str) -> None:
        while (job := self.take()) is not None:
            self.count(job)
            job.future.set_exception(WorkerDied(f"that {self.kind}s", fact))


def make_pool(kind: str, size: int, setup: bytes, hub: Registry | None, seconds: float) -> Pool:
    """A pool of workers of one of the KINDS: workers of the registry `hub` (see `RemotePool`), or
    processes that the pool starts if `hub` is None."""
    if hub is not None:
        return hub.pool(kind, size, setup, seconds)
    return WorkerPool(size, partial(LocalWorker, f"that {kind}s", KINDS[kind], setup))
