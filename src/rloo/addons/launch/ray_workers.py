"""Workers that are actors of Ray. Ray places the actors, detects that they died, and restarts them.

Each call of a worker is one call of an actor, and each message is one argument or one result. This
module does not need Ray.
"""

from __future__ import annotations

import atexit
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, Protocol

from rloo.addons.launch.roles import LaunchJob, Role
from rloo.addons.launch.supervisor import SIGNALS, note
from rloo.distributed.child_process import ChildProcess
from rloo.distributed.remote_pool import KINDS, Registration, RemoteWorker
from rloo.distributed.worker_loop import WorkerLoop
from rloo.distributed.worker_process import WorkerDied

# The kinds of workers by their roles.
KIND_OF = {"sampler": "sample", "scorer": "score"}
_CONNECT_SECONDS = 60.0
_PAUSE_SECONDS = 1.0

Done = Callable[[Any, BaseException | None], None]


class Actors(Protocol):
    """The functions of Ray that `RayRegistry` needs. All of them return at once, except
    `connect`."""

    def connect(self) -> Mapping[str, Sequence[Any]]:
        """Connect to Ray, and return the actors of each kind."""

    def join(self, actor: Any, done: Done) -> None:
        """Call `WorkerActor.join`, as soon as Ray has placed the actor. Then call `done` with the
        result and the error."""

    def call(self, actor: Any, parts: Sequence[bytes], done: Done) -> None:
        """Call `WorkerActor.call`."""

    def kill(self, actor: Any) -> None:
        """Kill the process of an actor. Ray restarts the actor."""

    def is_final(self, error: BaseException) -> bool:
        """Whether Ray does not restart an actor any more that had this error."""

    def close(self) -> None:
        """Disconnect from Ray."""


class RayRegistry(WorkerLoop):
    """See `Registry`. An actor that Ray has restarted is a new worker."""

    def __init__(self, actors: Actors) -> None:
        super().__init__()
        self._actors = actors
        self._connected: Future[None] = Future()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_woken = False
        self._actor_of: dict[bytes, Any] = {}
        self._calling: set[bytes] = set()
        # The times at which actors are asked to join again, and the actors that are not lost.
        self._later: list[tuple[float, str, Any]] = []
        self._left: dict[str, int] = {}
        self._facts: dict[str, str] = {}

    def open(self) -> None:
        """See `Registry`."""
        atexit.register(self.close)
        self._start()
        try:
            self._connected.result(_CONNECT_SECONDS)
        except Exception as error:
            raise OSError(f"the main process cannot connect to Ray: {error!r}") from error

    def finish(self) -> None:
        """See `Registry`. The launcher ends the actors."""

    def wake(self) -> None:
        """See `Links`."""
        if not self._is_woken:
            self._is_woken = True
            self._events.put(None)

    def hint(self, kind: str) -> str:
        """See `Links`."""
        return "`ray list actors` shows why"

    def send(self, worker: RemoteWorker, *parts: bytes) -> None:
        """See `Links`."""
        self._calling.add(worker.identity)
        actor = self._actor_of[worker.identity]
        self._actors.call(actor, parts, partial(self._later_do, self._answered, worker))

    def _communicate(self, seconds: float) -> None:
        if not self._connected.done():
            self._connect()
        now = time.monotonic()
        due = [each for each in self._later if each[0] <= now]
        self._later = [each for each in self._later if each[0] > now]
        for _, kind, actor in due:
            self._invite(kind, actor)
        try:
            event = self._events.get(timeout=seconds) if seconds else self._events.get_nowait()
            while True:
                if event is None:
                    self._is_woken = False
                else:
                    event()
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        for jobs in [*self._pools]:
            if jobs.kind in self._facts:
                jobs.end(self._facts[jobs.kind])

    def _stop(self) -> None:
        self._actors.close()

    def _disconnect(self, worker: RemoteWorker) -> None:
        actor = self._actor_of.pop(worker.identity)
        if worker.identity in self._calling:
            self._calling.remove(worker.identity)
            self._actors.kill(actor)
        self._invite(worker.hello.kind, actor)

    def _connect(self) -> None:
        try:
            actors = self._actors.connect()
        except Exception as error:  # `open` raises it
            with self._lock:
                self._is_closed = True
            self._connected.set_exception(error)
            return
        self._left = {kind: len(some) for kind, some in actors.items()}
        for kind, some in actors.items():
            for actor in some:
                self._invite(kind, actor)
        self._connected.set_result(None)

    def _later_do(self, do: Callable[..., None], worker: Any, *result: Any) -> None:
        self._events.put(partial(do, worker, *result))

    def _invite(self, kind: str, actor: Any) -> None:
        self._actors.join(actor, partial(self._later_do, self._joined, (kind, actor)))

    def _joined(
        self, invited: tuple[str, Any], place: tuple[str, int], error: BaseException | None
    ) -> None:
        kind, actor = invited
        if error is None:
            worker = RemoteWorker(secrets.token_bytes(8), Registration(kind, *place, time.time()))
            self._actor_of[worker.identity] = actor
            self._admit(worker)
        elif self._actors.is_final(error):
            self._left[kind] -= 1
            if not self._left[kind]:
                self._facts[kind] = f"has died too often: {_first_line(error)}"
        else:
            self._later.append((time.monotonic() + _PAUSE_SECONDS, kind, actor))

    def _answered(self, worker: RemoteWorker, answer: bytes, error: BaseException | None) -> None:
        if worker.gone:
            return
        self._calling.discard(worker.identity)
        if error is not None:
            self.lose(worker, WorkerDied(worker.name, f"has died: {_first_line(error)}"))
        elif worker.jobs is not None:
            worker.jobs.answered(worker, answer)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


@dataclass(frozen=True)
class _WorkerChild:
    """The process that computes, and the connection to it."""

    process: ChildProcess
    connection: Connection


class WorkerActor:
    """The actor of a worker. A child process computes. If the child dies, the actor ends too, and
    Ray restarts the actor. `join` may interrupt `call`."""

    def __init__(self, job: LaunchJob, role: Role, number: int, cwd: str) -> None:
        self._command = job.started(
            KINDS[KIND_OF[role.name]], module="rloo.distributed.worker_main"
        )
        self._environment, self._cwd = job.environment, cwd
        self._role, self._number, self._folder = role.name, number, job.logs
        self._lock = threading.Lock()
        self._child: _WorkerChild | None = None

    def join(self) -> tuple[str, int]:
        """End the child, and return the host and the process id of this actor."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.process.end()
        return socket.gethostname(), os.getpid()

    def call(self, *parts: bytes) -> bytes:
        """The child's answer. With two parts a new child starts, and the first part is its setup.
        Raises LookupError without a child: the caller knew an earlier actor."""
        with self._lock:
            if len(parts) == 2:
                self._child = self._start()
            if (child := self._child) is None:
                raise LookupError("this actor was restarted")
        try:
            for part in parts:
                child.connection.send_bytes(part)
            return child.connection.recv_bytes()
        except (EOFError, OSError):
            with self._lock:
                if self._child is child:  # otherwise `join` has ended it
                    self._note("ended", status=child.process.end())
                    os._exit(1)
            raise

    def _start(self) -> _WorkerChild:
        connection, theirs = Pipe()
        log = self._folder / f"{self._role}-{self._number}.log"
        with theirs:
            process = ChildProcess(
                self._command,
                "lifeline",
                environment={**os.environ, **self._environment},
                folder=self._cwd,
                log=log,
                channel=theirs.fileno(),
                unblocked=SIGNALS,
            )
        self._note("started", pid=process.pid)
        return _WorkerChild(process, connection)

    def _note(self, event: str, **more: Any) -> None:
        note(self._folder, self._role, self._number, event, **more)
