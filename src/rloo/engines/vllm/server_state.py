"""The state of a server in a run, with its weights, probes and replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch

from rloo.engines.vllm.client import ROUTE, TOKENS_ROUTE, ServerError, VLLMClient
from rloo.engines.vllm.server_process import LocalServer
from rloo.types import Completion


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """Tokens that a server sampled greedily after `prompt`, and their log-probs (T,) at temperature
    1."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def difference(self, other: LogprobProbe) -> float:
        """The mean absolute difference of log-probs over the common prefix of tokens; infinite if
        the first tokens differ."""
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        shortest = min(len(self.tokens), len(other.tokens))
        same = next((place for place, (mine, theirs) in pairs if mine != theirs), shortest)
        if same == 0:
            return float("inf")
        return mean_difference(self.logprobs[:same], other.logprobs[:same])


class RankProbe(NamedTuple):
    """The probe of the server `url` of a rank. Servers of different machines may have equal
    URLs."""

    rank: int
    url: str
    probe: LogprobProbe


def mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The mean absolute difference of two sequences of equal length."""
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / max(len(some), 1)


@dataclass(slots=True)
class ServerWeights:
    """A version of the weights: its folder and its label at the servers. `expected` has the
    trainer's log-probs of tokens that verified servers have sampled."""

    version: int
    folder: Path
    label: str
    expected: list[LogprobProbe] = field(default_factory=list)
    # A complete version that a server can be started with (None: `folder`).
    complete: Path | None = None
    # Writes a complete folder of this version, which is a delta.
    repair: Callable[[], Path] | None = None
    # All tensors on a device, in the main process, as long as the version is the newest.
    tensors: Callable[[torch.device], Iterator[tuple[str, torch.Tensor]]] | None = None


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """The probe of a server that waits for the trainer's log-probs, and the future that ends the
    wait."""

    probe: LogprobProbe
    verdict: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class ServerState:
    """A server and its state. A server with a `fault` is not used for sampling."""

    client: VLLMClient
    own: LocalServer | None = None
    route: str = ROUTE
    # The limit of completions to request at once (more would wait at the server), and how many run.
    room: int = 256
    busy: int = 0
    label: str = ""
    asleep: bool = False
    fault: str | None = None
    tries: int = 0
    losses: int = 0
    # The version whose folder the server may be reading; None if it reads no folder.
    reads: int | None = None
    # Whether the server can receive weights over NCCL.
    receives: bool = False
    # Whether the server can load deltas.
    extended: bool = False
    # The running requests, and the version that the server had when each was sent.
    calls: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    recovery: asyncio.Task[None] | None = None
    # Whether the server loads weights, the task that loads them, and the probe that is not verified
    # yet.
    loads: bool = False
    update: asyncio.Task[None] | None = None
    check: ProbeCheck | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return self.client.url

    @property
    def is_usable(self) -> bool:
        """Whether the server may sample."""
        return self.fault is None and not self.loads

    @property
    def tells(self) -> bool:
        """Whether the server's answers name the weights that sampled each token."""
        return self.route == TOKENS_ROUTE


@dataclass(frozen=True, slots=True, eq=False)
class ServerReply:
    """Completions, the server that sampled them, and how often this server had been lost before."""

    member: ServerState
    losses: int
    completions: list[Completion]


async def answered(member: ServerState, seconds: float) -> None:
    """Wait until a server has no running requests. Without this wait, a pause could overtake a
    request that was sent before, and new weights would sample that request. Raises ServerError
    after `seconds`."""
    end = time.monotonic() + seconds
    while member.busy and member.fault is None:
        if time.monotonic() > end:
            fact = f"has not finished what it was asked for within {seconds:g} s"
            raise ServerError("pausing", member.url, fact)
        await asyncio.sleep(0.02)


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_others() -> None:
    """Cancel all other tasks of the running event loop, and wait for their end."""
    # A task group of anyio, in which httpx connects, cancels its tasks itself, after they have
    # begun. If another cancels one before, Python warns that a coroutine was never awaited.
    inner = {info.id for info in anyio.get_running_tasks() if info.parent_id is not None}
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_all([task for task in others if id(task) not in inner])


@dataclass(slots=True)
class WaitClock:
    """A stopwatch that sums the seconds between `start` and `stop`."""

    before: float = 0.0
    since: float | None = None

    def start(self) -> None:
        """Start the stopwatch."""
        self.since = time.monotonic()

    def stop(self) -> None:
        """Stop the stopwatch."""
        self.before, self.since = self.seconds, None

    @property
    def seconds(self) -> float:
        """The total seconds so far."""
        return self.before + (time.monotonic() - self.since if self.since is not None else 0.0)
