"""The engine whose completions vLLM samples, on servers of ours or given ones."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rloo.distributed import World
from rloo.engines.sampling import sample_indices
from rloo.engines.vllm.client import VLLMClient
from rloo.engines.vllm.nccl import TRANSFER_ROUTE, NCCLTransfer
from rloo.engines.vllm.requests import CompletionRequest, requests_of
from rloo.engines.vllm.server_check import examine
from rloo.engines.vllm.server_pool import ServerPool
from rloo.engines.vllm.server_process import LocalServer, ServerConfig, reached, start_all
from rloo.engines.vllm.server_state import LogprobProbe, ServerState, ServerWeights, mean_difference
from rloo.engines.weight_store import WeightStore
from rloo.rewards.async_functions import LoopThread
from rloo.types import Completion, EngineCapabilities, NumSamples, Prompt, Sampling
from rloo.types import Weights as Named

T = TypeVar("T")
_PROBE_TEXT = "A train leaves at nine and is at the coast by noon. How long does it take? It takes"
# A perturbed adapter must move log-probs by so many times what counts as equal.
_MOVED = 5.0
_SCALES = (0.05, 0.2, 0.8, 3.2)


class WeightPublisher(Protocol):
    """The policy, as an engine in other processes needs it. Every method but `describe` is a
    collective of all processes of the run."""

    world: World
    # Whether what changes is an adapter that travels alone; its rank then.
    adapter_rank: int | None
    tokenizer: PreTrainedTokenizerBase
    # How many tokens the model embeds.
    vocabulary: int

    def write(self, folder: Path | None) -> None:
        """Write the weights that change, in the main process (None in the others)."""

    def write_base(self, folder: Path | None) -> None:
        """Write the model that an adapter is for."""

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        """Of a completion's tokens, at temperature 1."""

    def perturbed(self, scale: float) -> AbstractContextManager[None]:
        """Inside, the adapter is another one, the farther away the larger `scale`."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """How servers are found, and for how long they are waited for, in seconds. `urls` are of given
    ones; without them `devices` are those of ours, one entry a server. `needed`: the longest prompt
    and completion together, in tokens, as far as it is known. With `partial`, completions
    under way go on while weights are loaded. At a `sleep_level` (vLLM's: 1 keeps the weights in the
    host's memory, 2 drops them) servers sleep while nothing is sampled."""

    server: ServerConfig
    urls: tuple[str, ...] = ()
    devices: tuple[str | None, ...] = (None,)
    deadline: float = 1200.0
    start_deadline: float = 240.0
    restarts: int = 3
    tolerance: float = 1e-3
    needed: int = 0
    partial: bool = False
    sleep_level: int | None = None
    weights_folder: Path | None = None
    log_folder: Path | None = None


class VLLMEngine:
    """Samples on vLLM's servers, to which it gives the weights as versions of a folder. The main
    process alone speaks to them. After each load every server must say the version, and agree with
    the trainer about the log-probs of what it generates. Close it to stop our servers, and to
    remove the folder; the end of the process does the same."""

    def __init__(
        self,
        name: str,
        settings: VLLMSettings,
        source: WeightPublisher,
        say: Callable[[str], None] = print,
    ) -> None:
        self.capabilities = EngineCapabilities(
            name,
            copies_weights=True,
            shares_memory=False,
            exact_noise=False,
            filters=False,
            central=True,
        )
        self.version = -1
        self._settings, self._source, self._say = settings, source, say
        # Other runs on the same servers, and this one once it is resumed, count from 0 as well.
        self._token = secrets.token_hex(4)
        self._begun: list[Future[list[Completion]]] = []
        self._wanted: ServerWeights | None = None  # published, and not brought to the servers yet
        self._loop = LoopThread()
        self._prompt = list(source.tokenizer(_PROBE_TEXT)["input_ids"])
        self._open = _Open()
        self.close = weakref.finalize(self, _close, self._loop, self._open)
        if settings.urls and source.world.is_main:
            self._run(self._examine_given())

    # -- weights ---------------------------------------------------------------------------------

    def load(self, weights: Named, version: int) -> None:
        """Publish the weights as a new version, and have every server load it, unless it is the one
        that they have; those that sleep load it when they are sampled from, but for the first,
        after which what is free of a GPU is what an update will find. Raises NoServers where none
        is left that has it."""
        version = self._source.world.broadcast_object(version)
        if version == self.version:
            return
        source, main, first = self._source, self._source.world.is_main, self.version < 0
        if first and main:
            self._open.versions = WeightStore.made_in(self._settings.weights_folder, self._token)
        if first and source.adapter_rank is not None:
            self._write("base", source.write_base)
            self._start()
            self._require_adapters()
        path = self._write(version, source.write)
        self._wanted = ServerWeights(version, path, f"rloo-{self._token}-{version}")
        self.version = version
        if self._settings.sleep_level is None:
            self._bring()
        elif first:
            with self.prefix_caching():  # and then they sleep
                pass

    def _bring(self) -> None:
        """Have the servers load what was published last, and verify that they have."""
        sleep = self._settings.sleep_level is not None
        if sleep and self._source.world.device.type == "cuda":
            torch.cuda.empty_cache()  # of which the trainer has no use, and those that wake have
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return
        self._start()
        try:
            while not self._verify(wanted, probes := self._brought(wanted)):
                pass  # until one has passed, or all have used up their tries: NoServers
            if self._open.fleet and self._open.versions:
                self._run(self._open.fleet.verify_others(probes))
                self._open.versions.drop_older(self._open.fleet.oldest_in_use())
        finally:
            if self._open.fleet:
                self._run(self._open.fleet.release())

    def _brought(self, wanted: ServerWeights) -> dict[str, LogprobProbe]:
        """Have the servers load a version; what each says then, in all processes."""
        found = self._run(self._open.fleet.bring(wanted)) if self._open.fleet else {}
        said = {url: [probe.tokens, probe.logprobs] for url, probe in found.items()}
        shared: dict[str, Any] = self._source.world.broadcast_object(said)
        return {url: LogprobProbe(self._prompt, *values) for url, values in shared.items()}

    def _verify(self, wanted: ServerWeights, probes: dict[str, LogprobProbe]) -> bool:
        """Compare what each server says of its own tokens with what the trainer says of them.
        Whether one has passed."""
        known: dict[tuple[int, ...], list[float]] = {}
        for url, probe in probes.items():
            tokens = tuple(probe.tokens)
            if tokens not in known:
                known[tokens] = self._source.logprobs(probe.prompt, probe.tokens)
            ours = replace(probe, logprobs=known[tokens])
            apart = probe.difference(ours)
            if apart <= self._settings.tolerance:
                if ours not in wanted.expected:  # most servers say the same
                    wanted.expected.append(ours)
            elif self._open.fleet:
                fact = f"gives log-probs {apart:.3g} away from the trainer's after loading"
                self._call(
                    self._open.fleet.lose, url, f"{fact} {wanted.label} (engine_kwargs.tolerance)"
                )
        return self._source.world.broadcast_object(bool(wanted.expected))

    def _require_adapters(self) -> None:
        """Raise ValueError for servers on which another adapter does not count: some serve the base
        in silence where they do not know an adapter's names."""
        source = self._source
        tokens = self._prompt[-8:]
        base, enough = source.logprobs(self._prompt, tokens), _MOVED * self._settings.tolerance
        for scale in _SCALES:
            with source.perturbed(scale):
                moved = mean_difference(base, source.logprobs(self._prompt, tokens))
            if source.world.broadcast_object(moved >= enough):
                break
        with source.perturbed(scale):
            path = self._write("perturbed", source.write)
            wanted = ServerWeights(-1, path, f"rloo-{self._token}-perturbed")
            probes = self._brought(wanted)
            inside = [source.logprobs(p.prompt, p.tokens) for p in probes.values()]
        for (url, probe), ours in zip(probes.items(), inside, strict=True):
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

    def _write(self, name: int | str, write: Callable[[Path | None], None]) -> Path:
        """Write a version or another folder; in other processes than the main one take part."""
        if self._open.versions is None:
            write(None)
            return Path()
        if isinstance(name, int):
            return self._open.versions.write(name, write)
        folder = self._open.versions.folder / name
        folder.mkdir(parents=True)
        write(folder)
        return folder

    # -- servers ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Connect to the servers, ours started with what has been written, once."""
        settings = self._settings
        if self._open.versions is None or self._open.fleet is not None:
            return
        base = self._open.versions.folder / "base"
        model = base if base.exists() else self._open.versions.path(self._open.versions.all()[-1])
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
            base=base if base.exists() else None,
            sleep_level=settings.sleep_level,
            partial=settings.partial,
        )
        self._run(self._examine(members))
        for member in members:
            self._connect(member)

    async def _members(self, model: str) -> list[ServerState]:
        settings = self._settings
        if settings.urls:
            return [ServerState(VLLMClient(url)) for url in settings.urls]
        logs = settings.log_folder
        if logs is None or not logs.parent.is_dir():  # there is no run, and no folder of it
            logs = Path(model).parent
        owns = [
            LocalServer(settings.server, logs / f"vllm-{number}.log", devices)
            for number, devices in enumerate(settings.devices)
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
        # A few more than it computes at once wait there, so that none of its places is empty.
        member.route, member.room = facts.route, facts.sequences * 3 // 2
        member.receives = facts.receives

    def _connect(self, member: ServerState) -> None:
        """Have weights sent to a server over NCCL, where that is to be and it takes them."""
        settings, device = self._settings, self._source.world.device
        if settings.server.transfers and member.receives:
            member.transfer = NCCLTransfer(member.client, device, settings.deadline)
        elif settings.server.transfers:
            why = f"it has no route {TRANSFER_ROUTE} (--weight-transfer-config)"
            self._say(f"weights go to {member.url} by files, not over NCCL: {why}")

    # -- sampling --------------------------------------------------------------------------------

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`. Raises ValueError for sampling that vLLM does otherwise."""
        numbers = sample_indices(samples, prompts)
        requests = requests_of(prompts, numbers, sampling, noise)
        self._bring()
        if not prompts:
            return []
        assert self._open.fleet is not None, "load comes first"
        return self._run(self._open.fleet.generate(requests))

    @contextmanager
    def prefix_caching(self) -> Iterator[None]:
        """See `rloo.types.PrefixCaching`: servers keep what they have computed. Inside they do not
        sleep, and what one has begun goes on there."""
        self._bring()
        fleet = self._open.fleet
        try:
            if fleet is not None:
                self._run(fleet.begin())
                fleet.homes = {}
            yield
        finally:
            if fleet is not None:
                fleet.homes = None
                self._run(fleet.end())

    def submit(
        self, prompts: Sequence[Prompt], count: int, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """As `sample`, in the main process, and does not wait for it: of each prompt its
        completions, to come."""
        requests = requests_of(prompts, sample_indices(count, prompts), sampling, noise)
        fleet = self._open.fleet
        assert fleet is not None, "load comes first"

        async def one(request: CompletionRequest) -> list[Completion]:
            (completions,) = await fleet.generate([request])
            return completions

        begun = [self._loop.submit(one(request)) for request in requests]
        self._begun = [*(future for future in self._begun if not future.done()), *begun]
        return begun

    def cancel_pending(self) -> None:
        """Give up what was begun."""
        for future in self._begun:
            future.cancel()
        self._begun = []

    def busy_seconds(self) -> float:
        """For how long it has sampled so far."""
        return self._open.fleet.watch.seconds if self._open.fleet else 0.0

    def stats(self) -> dict[str, float]:
        """How often a server was lost and came back, and a group was asked for again, so far."""
        return dict(self._open.fleet.counts) if self._open.fleet else {}

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        done, _ = self._loop.run({"vllm": lambda: work}, None, lambda _: nullcontext())
        return done["vllm"].result()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        async def inside() -> None:
            function(*arguments)

        self._run(inside())


@dataclass(slots=True)
class _Open:
    """What is to be closed, whatever becomes of the engine: in the main process, once there is
    something to load."""

    versions: WeightStore | None = None
    fleet: ServerPool | None = None


def _close(loop: LoopThread, opened: _Open) -> None:
    if (fleet := opened.fleet) is not None:
        loop.run({"closing": fleet.close}, 15.0, lambda _: nullcontext())
        for member in fleet.members:
            if member.own is not None:
                member.own.over = True
                member.own.stop()
    loop.close()
    if opened.versions is not None:
        opened.versions.remove()
