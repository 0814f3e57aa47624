"""An engine that samples during training in worker processes, each with a copy of the weights.

The workers (`rloo.distributed.worker_process`) are started by the run or by a launcher. They read
weights from a folder with a subfolder per version. A lost worker is restarted or connects again,
and loads the newest version. Its unfinished requests are repeated."""

from __future__ import annotations

import json
import secrets
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from rloo import kernels
from rloo.distributed import World
from rloo.distributed.pytree import decode, encode
from rloo.distributed.worker_pool import WorkerPool, chain_future, wait_result
from rloo.distributed.worker_process import Worker
from rloo.distributed.worker_registry import WorkerRegistry, acquire_worker
from rloo.engines.engine_worker import EngineWorkerConfig
from rloo.engines.sampling import check_request, refuse_images, sample_indices
from rloo.engines.serialization import unpack
from rloo.engines.vllm.server_plugin.rloo_weights import WrongDigestError
from rloo.engines.weight_delta import DeltaWriter
from rloo.engines.weight_store import WeightStore
from rloo.kernels import cpu_matmul, gpu_kernels
from rloo.model.export import LayerSink
from rloo.types import Completion, EngineCapabilities, NumSamples, Prompt, Sampling, Weights


class WeightExporter(Protocol):
    """Writes the policy's weights for an engine in another process."""

    world: World

    def write(self, folder: Path | None, sink: LayerSink | None = None) -> None:
        """Write model and tokenizer in the main process, layers to `sink` if given; other ranks
        pass None. A collective."""


@dataclass(frozen=True, slots=True)
class RemoteEngineConfig:
    """The `size` workers of a `RemoteEngine`: from a `worker_registry` if given, otherwise started
    by the run. `seconds` is the deadline of a call and of a worker's start. Weights are written to
    `folder` (None: to this machine's shared memory or temporary folder). A version of the weights
    needs `room` bytes. With `deltas`, only changed tensors are written where possible."""

    size: int = 1
    worker_registry: WorkerRegistry | None = None
    seconds: float = 1800.0
    folder: Path | None = None
    room: int = 0
    deltas: bool = False

    def make(self, how: EngineWorkerConfig) -> Worker:
        """Start or acquire a worker with this configuration."""
        return acquire_worker(
            "sample", json.dumps(asdict(how)).encode(), self.worker_registry, self.seconds
        )


class RemoteEngine:
    """Samples in workers of the main process, for all processes. Each worker samples an equal part
    of the completions. `close`, or the end of this process, ends the workers."""

    def __init__(
        self, how: EngineWorkerConfig, source: WeightExporter, workers: RemoteEngineConfig
    ) -> None:
        self.capabilities = EngineCapabilities(
            how.engine,
            copies_weights=True,
            shares_memory=False,
            exact_noise=True,
            filters=True,
            central=True,
        )
        self.version = -1
        self._source, self._workers = source, workers
        self._crew: WorkerPool | None = None
        if source.world.is_main:
            self._crew = WorkerPool(workers.size, partial(workers.make, how))
        self._state = _State(workers.seconds)
        self.close = weakref.finalize(self, _close, self._crew, self._state)

    def load(self, weights: Weights, version: int) -> None:
        """Publish the weights, which all later sampling uses. See `rloo.types.Engine`. A
        collective."""
        version = self._source.world.broadcast_object(version)
        if version == self.version:
            return
        state = self._state
        if self._crew is None:
            self._source.write(None)
        else:
            if state.versions is None:
                for _ in range(self._workers.size):  # starts the workers
                    self._crew.submit(lambda worker: worker.call(b"", state.seconds))
                workers, name = self._workers, secrets.token_hex(4)
                state.versions = WeightStore.made_in(workers.folder, name, workers.room)
                state.deltas = DeltaWriter(state.versions) if workers.deltas else None
            folder = (state.deltas or state.versions).write(version, self._source.write)
            # Workers that a launcher started choose their number of threads themselves.
            threads = None if self._workers.worker_registry else torch.get_num_threads()
            state.publish(version, folder, threads)
        self.version = version

    def submit(
        self, prompts: Sequence[Prompt], count: int, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """Sample without waiting. Return one future per prompt, which gets the prompt's
        completions."""
        return self._begin(prompts, [range(count)] * len(prompts), sampling, noise, first=False)

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`. The call takes precedence over pending requests of `submit`."""
        if not prompts or self._crew is None:
            return []
        numbers = sample_indices(samples, prompts)
        return [*map(wait_result, self._begin(prompts, numbers, sampling, noise, first=True))]

    def _begin(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[range],
        sampling: Sampling,
        noise: int,
        *,
        first: bool,
    ) -> list[Future[list[Completion]]]:
        assert self._crew is not None, "the main process alone samples"
        check_request(prompts, min(map(len, numbers), default=1), sampling)
        knobs = "max_staleness 0, sampler_processes 0"
        refuse_images(prompts, f"which do not travel to a process that samples ({knobs})")
        how = {**asdict(replace(sampling, decode=None)), "noise": noise}
        joined = [_Joined() for _ in prompts]
        asked = []
        for share in _shares(numbers, self._workers.size):
            rows = []
            for index, part in share:
                prompt = prompts[index]
                rows.append([prompt.id, prompt.epoch, prompt.token_ids, [part.start, part.stop]])
            asked.append((share, partial(_ask, self._state, encode({"rows": rows, "how": how}))))
            for index, _ in share:
                joined[index].missing += 1
        for share, job in reversed(asked) if first else asked:
            done = self._crew.submit(job, first=first)
            for place, (index, part) in enumerate(share):
                joined[index].wait_for(done, place, part.start)
        return [each.future for each in joined]

    def cancel_pending(self) -> None:
        """Cancel the submitted requests that still wait for a worker."""
        if self._crew is not None:
            self._crew.cancel_pending()

    def stats(self) -> dict[str, float]:
        """How often a worker was lost, a worker returned, and a request was repeated, and the size
        of the last version of the weights, if it was written as a delta."""
        lost = float(self._crew.lost) if self._crew else 0.0
        counts = dict.fromkeys(("engine/lost", "engine/returned", "engine/repeated"), lost)
        return counts | (self._state.deltas.stats if self._state.deltas else {})

    def busy_seconds(self) -> float:
        """The seconds of sampling so far, as a mean over the workers."""
        return self._crew.busy_seconds() / self._crew.size if self._crew else 0.0


class _State:
    """State shared by the engine and the threads that call the workers."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.versions: WeightStore | None = None
        self.deltas: DeltaWriter | None = None
        # The newest version, its folder, and the number of threads to sample with.
        self.wanted: tuple[int, Path, int | None] | None = None
        # The versions that workers have loaded, or are loading.
        self.loaded: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        self.loading: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def publish(self, version: int, folder: Path, threads: int | None) -> None:
        """Set the version to load. Older versions are removed, unless a worker is loading them."""
        assert self.versions is not None
        with self._lock:
            self.wanted = version, folder, threads
            self.versions.keep({version, *self.loading.values()})

    def take(self, worker: Worker) -> tuple[int, Path, int | None]:
        """Return the newest version, and record that this worker is loading it."""
        with self._lock:
            assert self.wanted is not None, "load comes first"
            self.loading[worker] = self.wanted[0]
            return self.wanted


def _shares(numbers: Sequence[range], size: int) -> list[list[tuple[int, range]]]:
    """Split completions into at most `size` equal parts, in order. `numbers` has the numbers of
    each prompt's completions. A part is a list of prompt indices, each with a range of numbers."""
    total = sum(map(len, numbers))
    shares: list[list[tuple[int, range]]] = []
    for worker in range(size):
        start, stop = worker * total // size, (worker + 1) * total // size
        share, first = [], 0
        for index, some in enumerate(numbers):
            part = some[max(start - first, 0) : max(stop - first, 0)]
            share += [(index, part)] if part else []
            first += len(some)
        shares += [share] if share else []
    return shares


class _Joined:
    """A future of one prompt's completions, which several workers sample."""

    def __init__(self) -> None:
        self.future: Future[list[Completion]] = Future()
        self.future.set_running_or_notify_cancel()
        self.missing = 0
        self._parts: dict[int, list[Completion]] = {}
        self._lock = threading.Lock()

    def wait_for(self, done: Future[list[list[Completion]]], place: int, number: int) -> None:
        """Take the completions at `place` of the result of `done`. The first of these completions
        has this `number`."""
        part: Future[list[Completion]] = Future()
        part.add_done_callback(partial(self._take, number))
        chain_future(part, done, itemgetter(place))

    def _take(self, number: int, part: Future[list[Completion]]) -> None:
        with self._lock:
            if self.future.done():  # another part has failed
                return
            if (error := part.exception()) is not None:
                self.future.set_exception(error)
                return
            self._parts[number] = part.result()
            if len(self._parts) < self.missing:
                return
        self.future.set_result([c for _, some in sorted(self._parts.items()) for c in some])


def _ask(state: _State, message: bytes, worker: Worker) -> list[list[Completion]]:
    """Make the worker load the newest version if needed, and then sample."""
    version, folder, threads = state.take(worker)
    if state.loaded.get(worker) != version:
        wanted = {"load": str(folder), "version": version, "threads": threads}
        wanted |= {"onednn": cpu_matmul.in_use(), "cpu_kernels": kernels.in_use()}
        wanted["torch_compile"] = gpu_kernels.in_use()
        try:
            worker.call(encode(wanted), state.seconds)
        except WrongDigestError:
            assert state.deltas is not None, "only deltas have a digest"
            version, folder = state.deltas.write_complete()
            wanted |= {"load": str(folder), "version": version}
            worker.call(encode(wanted), state.seconds)
        state.loaded[worker] = version
    said = decode(worker.call(message, state.seconds))
    if said["version"] != version:
        raise RuntimeError(f"the process that samples has version {said['version']}, not {version}")
    flat = iter(unpack(said["completions"]))
    return [
        [replace(c, weight_versions=((version, len(c.token_ids)),)) for c in islice(flat, size)]
        for size in said["sizes"]
    ]


def _close(crew: WorkerPool | None, state: _State) -> None:
    if crew is not None:
        crew.close()
    if state.versions is not None:
        state.versions.remove()
