"""The engine that samples on vLLM servers, which the run starts or the user provides."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rloo.engines.sampling import sample_indices
from rloo.engines.vllm.client import VLLMClient
from rloo.engines.vllm.colocation import failing_together, on_all_ranks
from rloo.engines.vllm.nccl import TRANSFER_ROUTE, NCCLGroup
from rloo.engines.vllm.requests import CompletionRequest, requests_of
from rloo.engines.vllm.resources import OpenResources
from rloo.engines.vllm.server_check import examine
from rloo.engines.vllm.server_pool import ServerPool
from rloo.engines.vllm.server_process import LocalServer, reached, start_all
from rloo.engines.vllm.server_state import (
    LogprobProbe,
    RankProbe,
    ServerState,
    ServerWeights,
    mean_difference,
)
from rloo.engines.vllm.settings import VLLMSettings
from rloo.engines.vllm.weight_publisher import VersionFolders, WeightPublisher
from rloo.rewards.async_functions import LoopThread
from rloo.types import Completion, EngineCapabilities, NumSamples, Prompt, Sampling
from rloo.types import Weights as Named

T = TypeVar("T")
_PROBE_TEXT = "A train leaves at nine and is at the coast by noon. How long does it take? It takes"
# A perturbed adapter must change log-probs by at least this many times the tolerance.
_MOVED = 5.0
_SCALES = (0.05, 0.2, 0.8, 3.2)


class VLLMEngine:
    """Samples on vLLM servers, which load weights from a `WeightStore`. Only the first of the ranks
    that share an engine calls its servers. After each load every server must report the version,
    and its log-probs of tokens that it generates must match the trainer's log-probs. `close`, or
    the end of the process, stops the servers of the run and removes the store."""

    def __init__(
        self,
        name: str,
        settings: VLLMSettings,
        source: WeightPublisher,
        say: Callable[[str], None] = print,
    ) -> None:
        self.capabilities: EngineCapabilities = EngineCapabilities(
            name,
            copies_weights=True,
            shares_memory=False,
            exact_noise=False,
            filters=False,
            central=settings.ranks_per_engine is None,
            ranks_per_engine=settings.ranks_per_engine or 1,
        )
        self.version: int = -1
        self._settings, self._source, self._say = settings, source, say
        # Distinguishes this run's versions, since other runs, and a resumed run, also count from 0.
        self._token = secrets.token_hex(4)
        # Whether all servers can load deltas.
        self._extended = True
        self._begun: set[Future[list[Completion]]] = set()
        self._wanted: ServerWeights | None = None  # published, but not loaded yet
        self._loop = LoopThread()
        self._prompt = list(source.tokenizer(_PROBE_TEXT)["input_ids"])
        self._leads = source.world.rank % (settings.ranks_per_engine or source.world.size) == 0
        self._keeps_prefixes = False  # within `prefix_caching`
        self._started = False
        self._base: Path | None = None  # an adapter's base model
        self._counts: dict[str, float] = {}  # of the other ranks
        self._open = OpenResources()
        self.close: weakref.finalize[..., VLLMEngine] = weakref.finalize(
            self, self._open.close, self._loop
        )
        if settings.urls and source.world.is_main:
            self._run(self._examine_given())

    # -- weights ---------------------------------------------------------------------------------

    def load(self, weights: Named, version: int) -> None:
        """Publish the weights as a new version and load the version into every server, unless it is
        loaded already. Sleeping servers load it before they next sample. They load the first
        version immediately, so that afterwards as much GPU memory is free as during updates. Raises
        NoServers if no server could load the version."""
        version = self._source.world.broadcast_object(version)
        if version == self.version:
            return
        source, first = self._source, self.version < 0
        versions = self._open.versions or self._make_versions()
        if first and source.adapter_rank is not None:
            self._base = versions.write_folder("base", source.write_base)
            self._start(self._base)
            self._require_adapters(versions)
        self._wanted = versions.publish(version, f"rloo-{self._token}-{version}")
        self.version = version
        if self._settings.sleep_level is None:
            self._bring()
        elif first:
            with self.prefix_caching():  # the servers load the version, then sleep
                pass

    def _make_versions(self) -> VersionFolders:
        source, settings = self._source, self._settings
        self._token = source.world.broadcast_object(self._token)
        few = source.adapter_rank is None and source.dtype.itemsize == 2
        # Over NCCL a process sends from its own memory, and only the main process has the tensors.
        sendable = self.capabilities.central or not settings.server.transfers
        deltas = few and self._extended and sendable
        versions = self._open.versions = VersionFolders(
            source, settings.weights_folder, self._token, settings.deadline, deltas=deltas
        )
        if source.world.is_main and deltas and not self.capabilities.central:
            self._loop.submit(versions.answer_requests())
        return versions

    def _bring(self) -> None:
        """Load the last published version into the servers, and verify it."""
        world, sleep = self._source.world, self._settings.sleep_level is not None
        if sleep:
            self._source.free_cache()  # servers that wake up need the memory
        if sleep and self.capabilities.ranks_per_engine > 1:
            world.all_gather_object(None)  # all GPUs of a server must have the memory
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        self._start(self._base or wanted.complete or wanted.folder)
        try:
            while not self._verify(wanted, self._brought(wanted)):
                pass  # until a server passes; NoServers if all budgets are exhausted
        finally:
            if self._open.fleet:
                self._run(self._open.fleet.release())
        fleet = self._open.fleet
        oldest = on_all_ranks(world, lambda: fleet.loader.oldest_in_use() if fleet else None)
        if self._open.versions:
            self._open.versions.drop_older(min(v for v in oldest if v is not None))

    def _brought(self, wanted: ServerWeights, *, everyone: bool = False) -> list[RankProbe]:
        """Load a version into the servers. Return the probes of the servers that have loaded it, in
        all processes: of at least one server of each rank that calls servers, or of all with
        `everyone`."""

        def bring() -> dict[str, Any]:
            fleet = self._open.fleet
            found = self._run(fleet.bring(wanted, everyone=everyone)) if fleet else {}
            return {url: [probe.tokens, probe.logprobs] for url, probe in found.items()}

        parts = on_all_ranks(self._source.world, bring)
        both = ((rank, *item) for rank, found in enumerate(parts) for item in found.items())
        return [RankProbe(rank, url, LogprobProbe(self._prompt, *v)) for rank, url, v in both]

    def _verify(self, wanted: ServerWeights, probes: Sequence[RankProbe]) -> bool:
        """Compare each server's log-probs of its tokens with the trainer's log-probs. Return
        whether a server has passed."""
        known: dict[tuple[int, ...], list[float]] = {}
        for rank, url, probe in probes:
            tokens = tuple(probe.tokens)
            if tokens not in known:
                known[tokens] = self._source.logprobs(probe.prompt, probe.tokens)
            ours = replace(probe, logprobs=known[tokens])
            apart = probe.difference(ours)
            if apart <= self._settings.tolerance:
                if ours not in wanted.expected:  # most servers sample equal tokens
                    wanted.expected.append(ours)
            elif self._open.fleet and rank == self._source.world.rank:
                fact = f"gives log-probs {apart:.3g} away from the trainer's after loading"
                self._call(
                    self._open.fleet.lose, url, f"{fact} {wanted.label} (engine_kwargs.tolerance)"
                )
        return self._source.world.broadcast_object(bool(wanted.expected))

    def _require_adapters(self, versions: VersionFolders) -> None:
        """Raise ValueError for servers that ignore an adapter. Some servers silently serve the base
        if they do not know the names in an adapter."""
        source = self._source
        tokens = self._prompt[-8:]
        base, enough = source.logprobs(self._prompt, tokens), _MOVED * self._settings.tolerance
        for scale in _SCALES:
            with source.perturbed(scale):
                moved = mean_difference(base, source.logprobs(self._prompt, tokens))
            if source.world.broadcast_object(moved >= enough):
                break
        with source.perturbed(scale):
            path = versions.write_folder("perturbed", source.write)
            wanted = ServerWeights(-1, path, f"rloo-{self._token}-perturbed")
            probes = self._brought(wanted, everyone=True)
            inside = [source.logprobs(p.prompt, p.tokens) for _, _, p in probes]
        for (_, url, probe), ours in zip(probes, inside, strict=True):
            outside = source.logprobs(probe.prompt, probe.tokens)
            apart = mean_difference(probe.logprobs, ours)
            served = mean_difference(probe.logprobs, outside)
            if source.world.broadcast_object(apart > self._settings.tolerance or apart >= served):
                how = "those of the base" if served < apart else "neither the base's nor its own"
                raise ValueError(
                    f"{url} was given an adapter that moves log-probs by {moved:.3g}, and what it "
                    f"serves are {how}, {apart:.3g} away: it does not apply the adapter "
                    "(lora_target_modules, engine_kwargs.merge_adapter)"
                )

    # -- servers ---------------------------------------------------------------------------------

    def _start(self, model: Path) -> None:
        """Connect to the servers, once. Servers of the run start with the weights of `model`."""
        if self._started:
            return
        on_all_ranks(self._source.world, lambda: self._start_own(model) if self._leads else None)
        self._started = True

    def _start_own(self, model: Path) -> None:
        settings = self._settings
        members = self._run(self._members(str(model)))
        self._open.fleet = ServerPool(
            members,
            settings.deadline,
            settings.start_deadline,
            settings.restarts,
            self._source.adapter_rank is not None,
            settings.tolerance,
            self._prompt,
            self._say,
            self._examine_one,
            self._source.vocabulary,
            base=self._base,
            sleep_level=settings.sleep_level,
            partial=settings.partial,
        )
        self._run(self._examine(members))
        if settings.server.transfers:
            self._connect(members)

    async def _members(self, model: str) -> list[ServerState]:
        settings = self._settings
        if settings.urls:
            return [ServerState(VLLMClient(url)) for url in settings.urls]
        logs = settings.log_folder
        if logs is None or not logs.parent.is_dir():  # there is no run folder
            logs = Path(model).parent
        owns = [
            LocalServer(settings.server, logs / f"vllm-{number}.log", devices)
            for number, devices in enumerate(settings.devices, start=settings.first_number)
        ]
        started = await start_all(owns, model, settings.start_deadline)
        return [ServerState(client, own) for own, client in started]

    async def _examine_given(self) -> None:
        members = [ServerState(VLLMClient(url)) for url in self._settings.urls]
        try:
            for member in members:
                await reached(member.client, self._settings.start_deadline, self._say)
            await self._examine(members)
        finally:
            for member in members:
                await member.client.close()

    async def _examine(self, members: Sequence[ServerState]) -> None:
        for member in members:
            await self._examine_one(member)

    async def _examine_one(self, member: ServerState) -> None:
        settings, tokenizer = self._settings, self._source.tokenizer
        facts = await examine(member.client, settings.server, tokenizer, needed=settings.needed)
        # Some requests wait at the server, in addition to those that it computes, to fill its
        # batch.
        member.route, member.room = facts.route, facts.sequences * 3 // 2
        member.receives, member.extended = facts.receives, facts.extended
        self._extended = self._extended and facts.extended

    def _connect(self, members: Sequence[ServerState]) -> None:
        """Set up the transfer of weights over NCCL to the servers that support it."""
        assert self._open.fleet is not None
        device, seconds = self._source.world.device, self._settings.deadline
        self._open.fleet.loader.group = NCCLGroup(members, device, seconds, self._say)
        why = f"it has no route {TRANSFER_ROUTE} (--weight-transfer-config)"
        for member in members:
            if not member.receives:
                self._say(f"weights go to {member.url} by files, not over NCCL: {why}")

    # -- sampling --------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`. Raises ValueError for settings that vLLM does not support."""
        numbers = sample_indices(samples, prompts)
        requests = requests_of(prompts, numbers, sampling, noise)
        if self._keeps_prefixes:
            return self._generate(requests)
        self._bring()
        with self._ending_together():
            return self._generate(requests)

    def _generate(self, requests: Sequence[CompletionRequest]) -> list[list[Completion]]:
        if not requests:
            return []
        assert self._open.fleet is not None, "load comes first"
        return self._run(self._open.fleet.generate(requests))

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        """A context at whose end all servers of all ranks sleep, if they sleep. If a server has
        failed on one rank, all ranks raise. With a single engine this has no effect."""
        world = self._source.world
        if self.capabilities.central or world.collectives is None:
            yield
            return
        with failing_together(world):
            yield
        parts = world.all_gather_object(self._own_stats())
        names = dict.fromkeys(name for part in parts for name in part)
        self._counts = {name: sum(part.get(name, 0.0) for part in parts) for name in names}

    @contextmanager
    def prefix_caching(self) -> Iterator[None]:
        """See `rloo.types.PrefixCaching`. Within this context, servers keep their prefix caches and
        do not sleep, and a completion continues on the server that has its prefix."""
        self._bring()
        fleet = self._open.fleet
        with self._ending_together():
            try:
                if fleet is not None:
                    self._run(fleet.begin())
                    fleet.homes = {}
                self._keeps_prefixes = True
                yield
            finally:
                self._keeps_prefixes = False
                if fleet is not None:
                    fleet.homes = None
                    self._run(fleet.end())

    def submit(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """Sample without waiting, in the main process. Return one future per prompt, which gets the
        prompt's completions."""
        requests = requests_of(prompts, sample_indices(samples, prompts), sampling, noise)
        fleet = self._open.fleet
        assert fleet is not None, "load comes first"

        async def one(request: CompletionRequest) -> list[Completion]:
            (completions,) = await fleet.generate([request])
            return completions

        begun = [self._loop.submit(one(request)) for request in requests]
        self._begun.update(begun)
        for future in begun:
            future.add_done_callback(self._begun.discard)
        return begun

    def cancel_pending(self) -> None:
        """Cancel all submitted requests."""
        for future in self._begun.copy():
            future.cancel()

    def busy_seconds(self) -> float:
        """The total seconds of sampling so far."""
        return self._open.fleet.watch.seconds if self._open.fleet else 0.0

    def stats(self) -> dict[str, float]:
        """How often servers were lost and recovered, and requests were repeated, so far, and the
        size of the last version of the weights. With an engine for each rank: of all ranks, in all
        processes."""
        return self._own_stats() if self.capabilities.central else dict(self._counts)

    def _own_stats(self) -> dict[str, float]:
        counts = dict(self._open.fleet.counts) if self._open.fleet else {}
        return counts | (self._open.versions.stats() if self._open.versions else {})

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        done, _ = self._loop.run({"vllm": lambda: work}, None, lambda _: nullcontext())
        return done["vllm"].result()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        async def inside() -> None:
            function(*arguments)

        self._run(inside())
