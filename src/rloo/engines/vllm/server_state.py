"""A server in a run: what it should have, what it says, what is known of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rloo.engines.vllm.client import ServerError, VLLMClient
from rloo.engines.vllm.requests import ROUTE, TOKENS_ROUTE
from rloo.engines.vllm.server_process import LocalServer
from rloo.types import Completion


class WeightSender(Protocol):
    """Gives a server weights in another way than by the folder that it reads."""

    async def sent(self, folder: Path) -> None:
        """Send what is in the folder of a version."""


@dataclass(frozen=True, slots=True)
class LogprobProbe:
    """Tokens that a server found the most likely after `prompt`, and their log-probs (T,), at
    temperature 1."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def difference(self, other: LogprobProbe) -> float:
        """The mean difference of log-probs over the tokens that both begin with; infinite where
        there are none."""
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        shortest = min(len(self.tokens), len(other.tokens))
        same = next((place for place, (mine, theirs) in pairs if mine != theirs), shortest)
        if same == 0:
            return float("inf")
        return mean_difference(self.logprobs[:same], other.logprobs[:same])


def mean_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """The mean of the differences, without their signs, of as many numbers."""
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / max(len(some), 1)


@dataclass(slots=True)
class ServerWeights:
    """A version of the weights: its folder, the name by which servers know it, and, of each server
    with which it has been verified, what that says."""

    version: int
    folder: Path
    label: str
    expected: list[LogprobProbe] = field(default_factory=list)


@dataclass(slots=True)
class ServerState:
    """A server, and what is known of it. One with a `fault` is not sampled from."""

    client: VLLMClient
    own: LocalServer | None = None
    route: str = ROUTE
    # Completions that may be asked of it at once, and that are: more would only wait there.
    room: int = 256
    busy: int = 0
    label: str = ""
    asleep: bool = False
    fault: str | None = None
    tries: int = 0
    losses: int = 0
    # The version whose folder it may be reading, None before the first one.
    reads: int | None = None
    # Whether it takes weights over NCCL, and what sends them, where that is to be.
    receives: bool = False
    transfer: WeightSender | None = None
    # What is asked of it, and the version that it had then.
    calls: dict[asyncio.Task[Any], int] = field(default_factory=dict)
    recovery: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    @property
    def tells(self) -> bool:
        """Whether its answers themselves say which weights sampled them."""
        return self.route == TOKENS_ROUTE


@dataclass(frozen=True, slots=True, eq=False)
class ServerReply:
    """Completions, the server that sampled them, and how often it had been lost before."""

    member: ServerState
    losses: int
    completions: list[Completion]


async def answered(member: ServerState, seconds: float) -> None:
    """Wait until nothing is asked of a server: its pause might overtake what is on its way, which
    other weights would then sample. Raises ServerError after so many seconds."""
    end = time.monotonic() + seconds
    while member.busy and member.fault is None:
        if time.monotonic() > end:
            fact = f"has not finished what it was asked for within {seconds:g} s"
            raise ServerError("pausing", member.url, fact)
        await asyncio.sleep(0.02)


@dataclass(slots=True)
class WaitClock:
    """For how long it has run so far."""

    before: float = 0.0
    since: float | None = None

    def start(self) -> None:
        """Run from now on."""
        self.since = time.monotonic()

    def stop(self) -> None:
        """Run no more."""
        self.before, self.since = self.seconds, None

    @property
    def seconds(self) -> float:
        """All together."""
        return self.before + (time.monotonic() - self.since if self.since is not None else 0.0)
