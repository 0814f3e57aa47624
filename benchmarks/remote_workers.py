"""The cost of remote workers in the training process: the connections, the queue and the messages.
The workers are simulated. All other parts are real: the transport on the loopback, the pool, the
packed groups.

    python -m benchmarks.remote_workers [--workers 256] [--groups 10000] [--tokens 2048] [--steps 3]
        [--processes 4] [--ray]

The workers are sockets of a few processes, or with `--ray` threads of a few actors of a Ray that
this program starts. A worker answers a call at once with a packed group. A step is one call per
group. CPU seconds are of the training process, with all of its threads.
"without unpacking" leaves the answers as bytes, which is the cost of the transport and the queue.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

HEADER = "| workers | groups | what | CPU seconds a step | wall seconds a step | threads |"
SAMPLES = 4
SECONDS = 600.0
Take = Callable[[bytes], object]


def packed_group(tokens: int) -> bytes:
    """The answer of a worker: a group of SAMPLES completions with `tokens` tokens in total."""
    from rloo.distributed.pytree import encode
    from rloo.engines.serialization import pack
    from rloo.types import Completion

    size = tokens // SAMPLES
    logprobs = [-0.5] * size
    group = [Completion([7] * size, "stop", logprobs, logprobs) for _ in range(SAMPLES)]
    return encode({"version": 0, "sizes": [SAMPLES], "completions": pack(group)})


def unpacked(answer: bytes) -> object:
    """The completions of an answer."""
    from rloo.distributed.pytree import decode
    from rloo.engines.serialization import unpack

    return unpack(decode(answer)["completions"])


def serve(folder: Path, count: int, tokens: int) -> None:
    """Be `count` simulated workers of the run in `folder`, until this process is killed."""
    import zmq

    from rloo.distributed.worker_process import ANSWER as SUCCESS
    from rloo.distributed.worker_registry import FILE
    from rloo.distributed.worker_server import ANSWER, CALL, HELLO

    known = json.loads((folder / FILE).read_text())
    answer, context, poller = SUCCESS + packed_group(tokens), zmq.Context(), zmq.Poller()
    for _ in range(count):
        worker = context.socket(zmq.DEALER)
        worker.curve_serverkey = known["public"].encode()
        worker.curve_secretkey = known["secret"].encode()
        worker.curve_publickey = zmq.curve_public(known["secret"].encode())
        worker.connect(f"tcp://{known['host']}:{known['port']}")
        hello = {"kind": "sample", "host": "simulated", "pid": os.getpid()}
        worker.send_multipart([HELLO, json.dumps(hello).encode()])
        poller.register(worker, zmq.POLLIN)
    while True:
        for worker, _ in poller.poll():
            if worker.recv_multipart()[0] == CALL:
                worker.send_multipart([ANSWER, answer])


@contextmanager
def simulated(folder: Path, options: argparse.Namespace) -> Generator[None]:
    """The processes of the simulated workers."""
    share, more = divmod(options.workers, options.processes)
    module = [sys.executable, "-m", "benchmarks.remote_workers", "--serve", str(folder)]
    processes = [
        subprocess.Popen(
            [*module, "--workers", str(share + (n < more)), "--tokens", str(options.tokens)]
        )
        for n in range(options.processes)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


class SimulatedActor:
    """`WorkerActor` for several simulated workers."""

    def __init__(self, tokens: int) -> None:
        from rloo.distributed.worker_process import ANSWER as SUCCESS

        self._answer = SUCCESS + packed_group(tokens)

    def join(self) -> tuple[str, int]:
        """See `WorkerActor`."""
        return "simulated", os.getpid()

    def call(self, *_: bytes) -> bytes:
        """See `WorkerActor`."""
        return self._answer


@contextmanager
def opened(folder: Path, options: argparse.Namespace) -> Generator[Any]:
    """A registry with all simulated workers."""
    if options.ray:
        registry = ray_registry(options)
        workers: Any = nullcontext()
    else:
        from rloo.distributed.worker_registry import WorkerRegistry

        registry, workers = WorkerRegistry(folder, "127.0.0.1"), simulated(folder, options)
    registry.open()
    with workers:
        while len(registry.members()) < options.workers:
            time.sleep(0.1)
        yield registry
        registry.close()


def ray_registry(options: argparse.Namespace) -> Any:
    """The registry of the actors, each of which is several workers."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    from rloo.addons.launch.ray_actors import RayActors
    from rloo.addons.launch.ray_workers import RayRegistry

    class OfThisDriver(RayActors):
        """This process has connected already."""

        def connect(self) -> dict[str, list[Any]]:
            kind = ray.remote(SimulatedActor).options(
                num_cpus=0, max_concurrency=options.workers // options.processes + 1
            )
            actors = [kind.remote(options.tokens) for _ in range(options.processes)]
            return {"sample": [actors[n % len(actors)] for n in range(options.workers)]}

    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=200_000_000)
    return RayRegistry(OfThisDriver("", "", {}))


def measure_step(pool: Any, message: bytes, groups: int, take: Take) -> tuple[float, float]:
    """The CPU seconds and the seconds of one step."""
    from rloo.distributed.worker_pool import wait_result

    def job(_: object) -> Generator[tuple[bytes, float | None], bytes, object]:
        return take((yield message, SECONDS))

    wall, cpu = time.monotonic(), time.process_time()
    futures = [pool.submit(job) for _ in range(groups)]
    for future in futures:
        wait_result(future)
    return time.process_time() - cpu, time.monotonic() - wall


def measure(options: argparse.Namespace) -> list[str]:
    """The rows of the table."""
    from rloo.distributed.pytree import encode
    from rloo.distributed.remote_pool import make_pool

    message = encode({"rows": [[0, 0, [7] * 256, [0, SAMPLES]]], "how": {"temperature": 1.0}})
    rows = []
    kinds: dict[str, Take] = {"without unpacking": len, "with unpacking": unpacked}
    with tempfile.TemporaryDirectory() as name, opened(Path(name), options) as registry:
        pool = make_pool("sample", options.workers, b"{}", registry, SECONDS)
        for what, take in kinds.items():
            steps = [
                measure_step(pool, message, options.groups, take) for _ in range(options.steps + 1)
            ][1:]
            cpu, wall = (median(values) for values in zip(*steps, strict=True))
            rows.append(
                f"| {options.workers} | {options.groups:,} | {what} | {cpu:.2f} | {wall:.1f} "
                f"| {threading.active_count()} |"
            )
    return rows


def main(arguments: Sequence[str]) -> None:
    """Print the table, or serve as simulated workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        serve(options.serve, options.workers, options.tokens)
    print(HEADER, "|---|---|---|---|---|---|", *measure(options), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
