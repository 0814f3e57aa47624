"""An engine in a process of its own, with its own copy of the weights: it samples while we train.

The process is a worker (`rloo.dist.workers`); weights reach it as versions of a folder. One that is
lost is started again, loads the newest version, and does again what it had not finished.
"""

from __future__ import annotations

import importlib
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
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from rloo.config.files import load_pretrained
from rloo.dist import World
from rloo.dist.trees import decode, encode
from rloo.dist.workers import Crew, Worker, follow, result_of
from rloo.engines.packing import pack, unpack
from rloo.engines.sampling import check_request, numbers_of, refuse_images
from rloo.engines.versions import Versions
from rloo.model.loading import copy_from_file, load_processing_class, load_weights
from rloo.types import Completion, Engine, EngineFacts, Prompt, Samples, Sampling, Weights


class Source(Protocol):
    """The policy, as an engine in another process needs it."""

    world: World

    def write(self, folder: Path | None) -> None:
        """Write model and tokenizer, in the main process (None in the others); a collective."""


@dataclass(frozen=True, slots=True)
class How:
    """What the process makes its engine from, as JSON values. `engine` is native or hf, `model` the
    class of the model, as module and name; `precision` and `dtype`: see `EngineInputs`."""

    engine: str
    model: tuple[str, str]
    device: str
    pad_token_id: int
    precision: str | None
    dtype: str | None
    trust_remote_code: bool


def how_of(model: PreTrainedModel, **values: Any) -> How:
    """`How`, for a model of this class. Raises ValueError for one that another process cannot
    import."""
    kind = type(model)
    if kind.__module__ == "__main__" or kind.__module__.startswith("transformers_modules"):
        raise ValueError(
            f"the model's class {kind.__name__} is known in this process alone, and another one is "
            "to sample (max_staleness, sampler_process)"
        )
    return How(model=(kind.__module__, kind.__name__), **values)


class ApartEngine:
    """Samples in a process beside the main one, for all. `seconds` is the deadline of one call,
    `room` what the weights take in bytes. Close it to end the process; the end of this one does the
    same."""

    def __init__(self, how: How, source: Source, *, seconds: float, room: int = 0) -> None:
        self.facts = EngineFacts(
            how.engine,
            copies_weights=True,
            shares_memory=False,
            exact_noise=True,
            filters=True,
            central=True,
        )
        self.version = -1
        self._source, self._bytes = source, room
        self._crew: Crew | None = None
        if source.world.is_main:
            setup = json.dumps(asdict(how)).encode()
            make = partial(Worker, "that samples", "rloo.engines.apart:serve", setup)
            self._crew = Crew(1, make)
        self._state = _State(seconds)
        self.close = weakref.finalize(self, _close, self._crew, self._state)

    def load(self, weights: Weights, version: int) -> None:
        """Publish the weights: what is sampled from now on is sampled with them. See
        `rloo.types.Engine`; a collective."""
        version = self._source.world.from_main(version)
        if version == self.version:
            return
        state = self._state
        if self._crew is None:
            self._source.write(None)
        else:
            if state.versions is None:
                self._crew.begin(lambda worker: worker.call(b"", state.seconds))  # it may start
                state.versions = Versions.made_in(None, secrets.token_hex(4), self._bytes)
            folder = state.versions.write(version, self._source.write)
            state.publish(version, folder, torch.get_num_threads())
        self.version = version

    def begin(
        self, prompts: Sequence[Prompt], count: int, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """As `sample`, and does not wait for it: of each prompt its completions, to come."""
        job = self._begin(prompts, count, sampling, noise, first=False)
        parts: list[Future[list[Completion]]] = [Future() for _ in prompts]
        for number, part in enumerate(parts):
            part.set_running_or_notify_cancel()
            follow(part, job, itemgetter(number))
        return parts

    def sample(
        self, prompts: Sequence[Prompt], samples: Samples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`. It goes before what was only begun."""
        if not prompts or self._crew is None:
            return []
        return result_of(self._begin(prompts, samples, sampling, noise, first=True))

    def _begin(
        self,
        prompts: Sequence[Prompt],
        samples: Samples,
        sampling: Sampling,
        noise: int,
        *,
        first: bool,
    ) -> Future[list[list[Completion]]]:
        assert self._crew is not None, "the main process alone samples"
        numbers = numbers_of(samples, prompts)
        check_request(prompts, min(map(len, numbers), default=1), sampling)
        knobs = "max_staleness 0, sampler_process false"
        refuse_images(prompts, f"which do not travel to a process that samples ({knobs})")
        rows = [
            [prompt.id, prompt.epoch, prompt.token_ids, [part.start, part.stop]]
            for prompt, part in zip(prompts, numbers, strict=True)
        ]
        how = {**asdict(replace(sampling, decode=None)), "noise": noise}
        message = encode({"rows": rows, "how": how})
        return self._crew.begin(partial(_ask, self._state, message), first=first)

    def forget(self) -> None:
        """Give up what was begun and waits."""
        if self._crew is not None:
            self._crew.forget()

    def stats(self) -> dict[str, float]:
        """How often the process was lost, and what it had begun was begun again."""
        lost = float(self._crew.lost) if self._crew else 0.0
        return dict.fromkeys(("engine/lost", "engine/returned", "engine/repeated"), lost)

    def busy_seconds(self) -> float:
        """For how long it has sampled so far."""
        return self._crew.busy_seconds() if self._crew else 0.0


class _State:
    """What the engine and the thread that speaks to the process share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.versions: Versions | None = None
        # The newest version, and the threads that it is sampled with.
        self.wanted: tuple[int, Path, int] | None = None
        # The process that has loaded a version, and which; and the one that is being loaded.
        self.loaded: tuple[int, int] | None = None
        self.loading: int | None = None
        self._lock = threading.Lock()

    def publish(self, version: int, folder: Path, threads: int) -> None:
        """Have a version loaded; older ones are removed, but for one that is being loaded."""
        assert self.versions is not None
        with self._lock:
            self.wanted = version, folder, threads
            self.versions.keep({version, self.loading})

    def take(self) -> tuple[int, Path, int]:
        """The newest version, to be loaded now."""
        with self._lock:
            assert self.wanted is not None, "load comes first"
            self.loading = self.wanted[0]
            return self.wanted


def _ask(state: _State, message: bytes, worker: Worker) -> list[list[Completion]]:
    """Have the process load what is published, and then sample."""
    version, folder, threads = state.take()
    if state.loaded != (worker.pid, version):
        wanted = {"load": str(folder), "version": version, "threads": threads}
        worker.call(encode(wanted), state.seconds)
        state.loaded = worker.pid, version
    said = decode(worker.call(message, state.seconds))
    if said["version"] != version:
        raise RuntimeError(f"the process that samples has version {said['version']}, not {version}")
    flat = iter(unpack(said["completions"]))
    return [
        [replace(c, versions=((version, len(c.token_ids)),)) for c in islice(flat, size)]
        for size in said["sizes"]
    ]


def _close(crew: Crew | None, state: _State) -> None:
    if crew is not None:
        crew.close()
    if state.versions is not None:
        state.versions.remove()


# -- in the process --------------------------------------------------------------------------------


def serve(setup: bytes) -> Server:
    """What answers the calls, for `How` as JSON."""
    return Server(How(**json.loads(setup)))


class Server:
    """The model and its engine in the process that samples."""

    def __init__(self, how: How) -> None:
        self._how = how
        self._model: PreTrainedModel | None = None
        self._engine: Engine | None = None
        self._tokenizer: Any = None

    def __call__(self, message: bytes) -> bytes:
        """Answer one call: load a version, or sample."""
        said = decode(message) if message else {}
        if "load" in said:
            torch.set_num_threads(said["threads"])
            self._load(said["load"], said["version"])
        elif "rows" in said:
            return self._sample(said["rows"], said["how"])
        return b""

    def _load(self, folder: str, version: int) -> None:
        from rloo.engines import EngineInputs, build_engine

        how = self._how
        if self._model is None:
            module, name = how.model
            kind = getattr(importlib.import_module(module), name)
            self._model = load_pretrained(kind, folder, dtype=torch.float32).to(how.device)
            copy_from_file(self._model)
            self._tokenizer = load_processing_class(folder, trust=how.trust_remote_code)
            inputs = EngineInputs(
                self._model,
                how.pad_token_id,
                precision=getattr(torch, how.precision) if how.precision else None,
                dtype=getattr(torch, how.dtype) if how.dtype else None,
            )
            self._engine, _ = build_engine(how.engine, inputs)
        else:
            load_weights(self._model, folder)
        assert self._engine is not None
        self._engine.load(self._model.named_parameters, version)

    def _sample(self, rows: list[Any], given: dict[str, Any]) -> bytes:
        assert self._engine is not None
        noise = given.pop("noise")
        sampling = Sampling(**given)
        if sampling.stop_strings:
            sampling = replace(sampling, decode=self._tokenizer.batch_decode)
        prompts = [Prompt(number, ids, "", epoch=epoch) for number, epoch, ids, _ in rows]
        numbers = [range(*part) for *_, part in rows]
        found = self._engine.sample(prompts, numbers, sampling, noise)
        flat = [completion for group in found for completion in group]
        sizes = [len(group) for group in found]
        return encode({"version": self._engine.version, "sizes": sizes, "completions": pack(flat)})
