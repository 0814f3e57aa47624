"""A server in a run: what it should have, what it says, what is known of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.engines.vllm.answers import ROUTE, TOKENS_ROUTE
from rloo.engines.vllm.client import Client
from rloo.engines.vllm.serving import OwnServer
from rloo.types import Completion


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens that a server found the most likely after `prompt`, and their log-probs (T,), at
    temperature 1."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]

    def difference(self, other: Probe) -> float:
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
class Weights:
    """A version of the weights: its folder, the name by which servers know it, and, of each server
    with which it has been verified, what that says."""

    version: int
    folder: Path
    label: str
    expected: list[Probe] = field(default_factory=list)


@dataclass(slots=True)
class Member:
    """A server, and what is known of it. One with a `fault` is not sampled from."""

    client: Client
    own: OwnServer | None = None
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
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
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
class Answer:
    """Completions, the server that sampled them, and how often it had been lost before."""

    member: Member
    losses: int
    completions: list[Completion]
