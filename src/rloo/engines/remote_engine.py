"""An engine that samples during training in worker processes, each with a copy of the weights.

The workers (`rloo.distributed.worker_process`) are started by the run or by a launcher. They read
weights from a folder with a subfolder per version. A lost worker is restarted or connects again,
and loads the newest version. Its unfinished requests are repeated."""

from __future__ import annotations

import json
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from rloo import kernels
from rloo.distributed import World
from rloo.distributed.pytree import decode, encode
from rloo.distributed.remote_pool import Registry, make_pool
from rloo.distributed.worker_pool import Calls, Pool, call_once, wait_result
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
    worker_registry: Registry | None = None
    seconds: float = 1800.0
    folder: Path | None = None
    room: int = 0
    deltas: bool = False

    def make(self, how: EngineWorkerConfig) -> Pool:
        """A pool of workers with this configuration."""
        setup = json.dumps(asdict(how)).encode()
        return make_pool("sample", self.size, setup, self.worker_registry, self.seconds)


class RemoteEngine:
    """Samples in workers of the main process, for all processes. A worker that is free takes its
    part of the completions that wait: an equal part of a rollout, or all turns of episodes that
    came while the workers were busy. `close`, or the end of this process, ends the workers."""

    def __init__(
        self, how: EngineWorkerConfig, source: WeightExporter, workers: RemoteEngineConfig
    ) -> None:
        self.capabilities: EngineCapabilities = EngineCapabilities(
            how.engine,
            copies_weights=True,
            shares_memory=False,
            exact_noise=True,
            filters=True,
            central=True,
        )
        self.version: int = -1
        self._source, self._workers = source, workers
        self._crew: Pool | None = workers.make(how) if source.world.is_main else None
        self._state, self._waiting = _State(workers.seconds), _WaitingRows()
        self.close: weakref.finalize[..., RemoteEngine] = weakref.finalize(
            self, _close, self._crew, self._state
        )

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
                    self._crew.submit(partial(call_once, b"", state.seconds))
                workers, name = self._workers, secrets.token_hex(4)
                state.versions = WeightStore.made_in(workers.folder, name, workers.room)
                state.deltas = DeltaWriter(state.versions) if workers.deltas else None
            folder = (state.deltas or state.versions).write(version, self._source.write)
            # Workers that a launcher started choose their number of threads themselves.
            threads = None if self._workers.worker_registry else torch.get_num_threads()
            state.publish(version, folder, threads)
        self.version = version

    def submit(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """Sample without waiting. Return one future per prompt, which gets the prompt's
        completions."""
        numbers = sample_indices(samples, prompts)
        return self._begin(prompts, numbers, sampling, noise, first=False)

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
        how = encode({**asdict(replace(sampling, decode=None)), "noise": noise})
        joined = [_JoinedCompletions(len(some)) for some in numbers]
        rows = [*map(_WaitingRow, prompts, numbers, joined)]
        for _ in range(self._waiting.put(how, rows, self._workers.size)):
            job = _SampleJob(self._state, self._waiting, how)
            self._crew.submit(job, first=first).add_done_callback(job.deliver)
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
        self.loaded: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self.loading: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def publish(self, version: int, folder: Path, threads: int | None) -> None:
        """Set the version to load. Older versions are removed, unless a worker is loading them."""
        assert self.versions is not None
        with self._lock:
            self.wanted = version, folder, threads
            self.versions.keep({version, *self.loading.values()})

    def take(self, worker: object) -> tuple[int, Path, int | None]:
        """Return the newest version, and record that this worker is loading it."""
        with self._lock:
            assert self.wanted is not None, "load comes first"
            self.loading[worker] = self.wanted[0]
            return self.wanted

    def repair(self, worker: object) -> tuple[int, Path]:
        """Write the newest version completely, for a worker that refused a delta. Return the
        version and its folder. The version may be newer than that of `take`."""
        with self._lock:
            assert self.deltas is not None, "only deltas have a digest"
            version, folder = self.deltas.write_complete()
            self.loading[worker] = version
            return version, folder


class _JoinedCompletions:
    """A future of the `count` completions of one prompt, which several workers may sample."""

    def __init__(self, count: int) -> None:
        self.future: Future[list[Completion]] = Future()
        self.future.set_running_or_notify_cancel()
        self._missing = count
        self._parts: dict[int, list[Completion]] = {}
        self._lock = threading.Lock()

    def take(self, number: int, part: list[Completion]) -> None:
        """Take completions, of which the first has this `number`."""
        with self._lock:
            self._parts[number] = part
            self._missing -= len(part)
            if self._missing or self.future.done():
                return
        self.future.set_result([c for _, some in sorted(self._parts.items()) for c in some])

    def fail(self, error: BaseException) -> None:
        """Set the exception, unless another part has failed before."""
        with self._lock:
            failed, self._missing = self.future.done(), -1  # no part completes it any more
        if not failed:
            self.future.set_exception(error)


@dataclass(slots=True)
class _WaitingRow:
    """A prompt, the numbers of its completions that no worker has taken, and their receiver."""

    prompt: Prompt
    numbers: range
    joined: _JoinedCompletions


@dataclass(slots=True)
class _WaitingRows:
    """The rows that wait for a worker, and the number of jobs that will take them, for each
    encoding of sampling parameters and noise. There are as many jobs as workers, or fewer."""

    _rows: dict[bytes, list[_WaitingRow]] = field(default_factory=dict)
    _jobs: Counter[bytes] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, how: bytes, rows: Sequence[_WaitingRow], workers: int) -> int:
        """Add rows. Return the number of jobs to submit for them."""
        with self._lock:
            waiting = self._rows.setdefault(how, [])
            waiting += rows
            total = sum(len(row.numbers) for row in waiting)
            added = max(min(workers, total) - self._jobs[how], 0)
            self._jobs[how] += added
            return added

    def take(self, how: bytes) -> list[_WaitingRow]:
        """Remove the rows of one job: an equal part of the completions, in order."""
        with self._lock:
            waiting, taken = self._rows.pop(how, []), []
            left = sum(len(row.numbers) for row in waiting) // self._jobs[how]
            self._jobs[how] -= 1
            while left and waiting:
                row = waiting.pop(0)
                part, rest = row.numbers[:left], row.numbers[left:]
                taken.append(_WaitingRow(row.prompt, part, row.joined))
                left -= len(part)
                if rest:
                    waiting.insert(0, _WaitingRow(row.prompt, rest, row.joined))
            if waiting:
                self._rows[how] = waiting
            if not self._jobs[how]:
                del self._jobs[how]
            return taken


class _SampleJob:
    """Samples rows in a worker. The job takes the rows when a worker is free. A job that is
    repeated, since its worker was lost, samples the same rows."""

    def __init__(self, state: _State, waiting: _WaitingRows, how: bytes) -> None:
        self._state, self._waiting, self._how = state, waiting, how
        self._rows: list[_WaitingRow] | None = None

    def __call__(self, worker: object) -> Calls[list[list[Completion]]]:
        rows = self._taken()
        if not rows:
            return []
        sent = [
            [row.prompt.id, row.prompt.epoch, row.prompt.token_ids,
             [row.numbers.start, row.numbers.stop], row.prompt.offset]
            for row in rows
        ]  # fmt: skip
        message = encode({"rows": sent, "how": decode(self._how)})
        return (yield from _ask(self._state, message, worker))

    def deliver(self, done: Future[list[list[Completion]]]) -> None:
        """Send the completions, or the error, to the receivers of the rows."""
        rows = self._taken()
        if done.cancelled():
            error: BaseException | None = RuntimeError("it was given up")
        else:
            error = done.exception()
        if error is not None:
            for row in rows:
                row.joined.fail(error)
            return
        for row, part in zip(rows, done.result(), strict=True):
            row.joined.take(row.numbers.start, part)

    def _taken(self) -> list[_WaitingRow]:
        if self._rows is None:
            self._rows = self._waiting.take(self._how)
        return self._rows


def _ask(state: _State, message: bytes, worker: object) -> Calls[list[list[Completion]]]:
    """Make the worker load the newest version if needed, and then sample."""
    version, folder, threads = state.take(worker)
    if state.loaded.get(worker) != version:
        wanted = {"load": str(folder), "version": version, "threads": threads}
        wanted |= {"onednn": cpu_matmul.in_use(), "cpu_kernels": kernels.in_use()}
        wanted["torch_compile"] = gpu_kernels.in_use()
        try:
            yield encode(wanted), state.seconds
        except WrongDigestError:
            version, folder = state.repair(worker)
            wanted |= {"load": str(folder), "version": version}
            yield encode(wanted), state.seconds
        state.loaded[worker] = version
    said = decode((yield message, state.seconds))
    if said["version"] != version:
        raise RuntimeError(f"the process that samples has version {said['version']}, not {version}")
    flat = iter(unpack(said["completions"]))
    return [
        [replace(c, weight_versions=((version, len(c.token_ids)),)) for c in islice(flat, size)]
        for size in said["sizes"]
    ]


def _close(crew: Pool | None, state: _State) -> None:
    if crew is not None:
        crew.close()
    if state.versions is not None:
        state.versions.remove()
