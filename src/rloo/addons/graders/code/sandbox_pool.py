"""Pools of sandboxed workers, and their requests. A handler answers the requests. It is a module of
`guest` with a function `answer(request, stage)`. The workers get the source of the handler and of
the modules that it needs."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rloo
from rloo.addons.graders.code import isolation
from rloo.addons.graders.code.guest.resource_limits import wall_seconds
from rloo.addons.graders.code.isolation import IsolationUnavailable
from rloo.distributed.worker_pool import WorkerPool
from rloo.distributed.worker_process import Worker

_GUEST = "rloo.addons.graders.code.guest"
_CODEC = "rloo.distributed.value_codec"
_BASE = (
    "seccomp", "syscalls", "program_source", "leetcode_nodes", "object_server", "program",
    "resource_limits", "process_tree",
)  # fmt: skip
JUDGE = (
    "compare", "proxy_types", "object_proxy", "numpy_subset", "pytest_subset", "test_suite",
    "test_cases", "judge",
)  # fmt: skip
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """The limits of one program. `seconds` (for one run or case) and `total_seconds` count the CPU
    time of all its processes, and time in which all of them are idle. The function `wall_seconds`
    computes the limits on wall-clock time from both. `memory` limits the bytes of all its
    processes, including kernel memory, and the address space of each process of our interpreter.
    `processes` counts processes and threads. `output` is the bytes of one run's output or of one
    value. `disk` and `files` are the bytes and the number of its files."""

    seconds: float = 5.0
    total_seconds: float = 30.0
    memory: int = 1 << 30
    processes: int = 64
    output: int = 1 << 22
    disk: int = 1 << 26
    files: int = 4096

    def __post_init__(self) -> None:
        for known in fields(self):
            value, least = getattr(self, known.name), 1 << 26 if known.name == "memory" else 0
            kinds = (int, float) if known.type == "float" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > least:
                kind = "a number" if known.type == "float" else "an integer"
                raise ValueError(
                    f"{known.name} is {value!r}; it is {kind} above {least} (option of code)"
                )
        if not self.seconds <= self.total_seconds <= 3600:
            raise ValueError(
                f"seconds is {self.seconds} and total_seconds {self.total_seconds}; they need "
                "seconds <= total_seconds <= 3600 (options of code)"
            )


@dataclass(frozen=True, slots=True)
class AllowedModules:
    """The modules that programs may import in addition to the standard library: the folders of the
    modules, and the names of modules that a worker tries to import before it forks."""

    folders: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


class SandboxWorker(Worker):
    """A sandboxed process that forks for each request, and ends when this process ends."""

    def __init__(
        self,
        wall: str,
        limits: ResourceLimits,
        modules: Sequence[str],
        library: AllowedModules,
        processor: int | None,
    ) -> None:
        """`modules` are names of modules of `guest` in loading order; the last one is the handler.
        Programs run on `processor`. Raises IsolationUnavailable."""
        self.processor = processor
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._started = isolation.start(wall, theirs, library.folders, processor)
            except BaseException:
                ours.close()
                raise
        names = [_CODEC, *(f"{_GUEST}.{name}" for name in (*modules, "guest_main"))]
        setup = {
            "main": names[-1],
            "modules": [(name, _text(name)) for name in names],
            "handler": f"{_GUEST}.{modules[-1]}",
            "wall": self._started.told,
            "limits": asdict(limits),
            "library": library.modules,
        }
        super().__init__(f"behind {wall}", Connection(ours.detach()), json.dumps(setup).encode())

    @property
    def is_alive(self) -> bool:
        """Whether the outermost process is alive, see `Worker`."""
        return self._started.process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the outermost process."""
        return self._started.process.pid

    def kill(self) -> None:
        """See `Worker`."""
        self._started.process.kill()

    def end(self) -> None:
        """See `Worker`."""
        self._started.process.end()
        with self._closing:
            self._disconnect()
        self._started.remove_folder()

    def _status(self) -> int:
        return self._started.process.join()


class SandboxPool:
    """`size` sandboxed workers that answer requests in order. If a worker is lost, another worker
    answers its request. The workers end when the pool is closed or this process ends."""

    def __init__(
        self,
        wall: str,
        size: int,
        limits: ResourceLimits,
        modules: Sequence[str] = JUDGE,
        library: AllowedModules = AllowedModules(),
    ) -> None:
        modules = (*_BASE, *modules)
        self._seconds = _START_SECONDS + 3 * wall_seconds(limits.total_seconds)
        made: list[SandboxWorker] = []
        choosing = threading.Lock()

        def make() -> Worker:
            with choosing:
                processor = _choose_processor([w.processor for w in made if w.is_alive])
                made.append(SandboxWorker(wall, limits, modules, library, processor))
                return made[-1]

        self._crew = WorkerPool(size, make)
        self.close: weakref.finalize[..., SandboxPool] = weakref.finalize(
            self, _end, self._crew, made
        )

    def submit(self, request: dict[str, Any]) -> Future[dict[str, Any]]:
        """Submit a request. The future raises the handler's exceptions, and WorkerDied if the
        sandbox failed several times."""
        message = json.dumps(request).encode()

        def job(worker: Worker) -> dict[str, Any]:
            answer: dict[str, Any] = json.loads(worker.call(message, self._seconds))
            return answer

        return self._crew.submit(job)

    @property
    def pids(self) -> list[int]:
        """The process ids of the outermost processes."""
        return self._crew.pids

    @property
    def lost(self) -> int:
        """The number of workers lost so far."""
        return self._crew.lost

    def cancel_pending(self) -> None:
        """Cancel running and waiting requests."""
        self._crew.cancel_pending()


def _choose_processor(taken: Sequence[int | None]) -> int | None:
    """The processor with the fewest living workers. Ties are broken differently in each process."""
    mine = sorted(os.sched_getaffinity(0))
    first = os.getpid() % len(mine)
    return min(mine[first:] + mine[:first], key=taken.count)


def _end(crew: WorkerPool, made: Sequence[Worker]) -> None:
    crew.close()
    for worker in made:  # the pool's threads also end workers, but are not joined
        worker.end()


@cache
def _text(name: str) -> str:
    """The source text of a module of the package."""
    path = Path(rloo.__file__).parent.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").read_text(encoding="utf-8")


@cache
def unavailable_reason(wall: str) -> str | None:
    """Why a sandbox does not work on this machine, or None. The probe runs once per process."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        program = isolation.write_probe(folder, server.getsockname())
        staff = SandboxPool(wall, 1, ResourceLimits())
        try:
            begun = staff.submit({"kind": "run", "program": program, "given": ""})
            said = begun.result(2 * _START_SECONDS)["output"]
        except (IsolationUnavailable, OSError, TimeoutError, ValueError) as error:
            return str(error)
        finally:
            staff.close()
    if said.strip() == "probed":
        return None
    return "it does not hold: " + "; ".join(said.strip().split("\n")[-3:])


def choose_isolation(asked: str | None = None) -> str:
    """The kind of sandbox to use: `asked`, or without it the first kind that works. Raises
    ValueError if none works."""
    reasons = {}
    for wall in (asked,) if asked else isolation.ISOLATION_BACKENDS:
        if (reason := unavailable_reason(wall)) is None:
            return wall
        reasons[wall] = reason
    told = "; ".join(f"{wall}: {reason}" for wall, reason in reasons.items())
    raise ValueError(
        "the reward 'code' runs what the model wrote, and no wall to contain it holds on this "
        f"machine ({told}); install bubblewrap and util-linux where user namespaces are allowed, "
        "or use Linux 6.12 with Landlock (reward)"
    )
