"""Loads versions of the weights into servers. A server that has loaded and verified a version
samples immediately, while other servers still load it. All code runs in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rloo.engines.vllm.client import ServerError
from rloo.engines.vllm.nccl import NCCLGroup, fill
from rloo.engines.vllm.requests import CompletionRequest, greedy
from rloo.engines.vllm.router import LoadBalancer
from rloo.engines.vllm.server_state import (
    LogprobProbe,
    ProbeCheck,
    ServerState,
    ServerWeights,
    answered,
)
from rloo.types import Completion, Prompt, Sampling

PROBE_TOKENS = 16


@dataclass(slots=True)
class WeightLoader:
    """Loads versions into `members`, within `deadline` seconds each. With `adapters`, versions are
    LoRA adapters. With `partial`, running completions continue with new weights; if not, a server
    finishes them before it loads. `tolerance` is the largest accepted `LogprobProbe.difference` on
    `prompt`. `ask` sends a request to a server, and `lose` marks a server as lost."""

    members: list[ServerState]
    places: LoadBalancer
    deadline: float
    adapters: bool
    partial: bool
    tolerance: float
    prompt: list[int]
    say: Callable[[str], None]
    ask: Callable[[ServerState, CompletionRequest], Coroutine[Any, Any, list[Completion]]]
    lose: Callable[[ServerState, ServerError], None]
    # Sends versions over NCCL, if this is enabled.
    group: NCCLGroup | None = None
    # The newest version, and the versions by the labels under which servers have loaded them.
    weights: ServerWeights | None = None
    labels: dict[str, int] = field(default_factory=dict)
    # Set when a server has a probe, is lost or is recovered.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    refusals: list[ServerError] = field(default_factory=list)

    async def bring(self, weights: ServerWeights, *, everyone: bool) -> dict[str, LogprobProbe]:
        """Start to load a version into every server. Return the results on the probe prompt as soon
        as a server has loaded the version; with `everyone`, as soon as all servers have. Until
        `release`, these servers do not sample. Raises NoServers if no server is left."""
        if weights is not self.weights:
            self._begin(weights)
        live = [member for member in self.members if member.fault is None]
        for member in live:
            if member.update is None or member.update.done():
                member.update = asyncio.create_task(self._update_or_lose(member))
        while True:
            checks = {m.url: m.check for m in self.members if m.check is not None}
            loading = [m for m in live if m.fault is None and m.check is None]
            if checks and not (everyone and loading):
                return {url: check.probe for url, check in checks.items()}
            if live and len(self.refusals) >= len(live):
                raise self.refusals[0]  # all are healthy and reject it: a retry would fail too
            self.places.require_servers()
            self.changed.clear()
            await self.changed.wait()

    def _begin(self, weights: ServerWeights) -> None:
        self.weights, self.refusals = weights, []
        for member in self.members:
            member.loads = True
        oldest = min([self.oldest_in_use(), *(v for m in self.members for v in m.calls.values())])
        used = {member.label for member in self.members}
        kept = {label: v for label, v in self.labels.items() if v >= oldest or label in used}
        self.labels = kept | {weights.label: weights.version}
        self.release()  # servers that have an older version load this one

    def release(self) -> None:
        """Let servers sample that have been verified. Call this method when the log-probs of the
        trainer are known, or if there will be none."""
        for member in self.members:
            if member.check is not None:
                check, member.check = member.check, None
                check.verdict.set_result(None)

    def reject(self, member: ServerState, error: ServerError) -> bool:
        """End the wait of a server for `release`, with an error. Return whether it waits."""
        check, member.check = member.check, None
        if check is not None:
            check.verdict.set_exception(error)
        return check is not None

    async def update(self, member: ServerState) -> None:
        """Load the newest version into a server and verify it, after `release` if the log-probs of
        the trainer are not known yet. If there is a newer version by then, this one is loaded, too.
        Raises ServerError."""
        while True:
            assert self.weights is not None
            weights = self.weights
            try:
                await self.load(member, weights)
                await self._verify(member, weights)
            except ServerError:
                if weights is self.weights:
                    raise
            if weights is self.weights:
                member.loads = False
                return

    async def _update_or_lose(self, member: ServerState) -> None:
        try:
            await self.update(member)
        except ServerError as error:
            self.refusals.extend([error] if error.is_refusal else [])
            self.lose(member, error)
        # All errors are caught, since no other code would report an error of this task.
        except (OSError, ValueError, RuntimeError) as error:
            fact = f"has not loaded them: {error}"
            self.lose(member, ServerError("loading weights", member.url, fact))
        else:
            self.places.restore_server(member)

    async def _verify(self, member: ServerState, weights: ServerWeights) -> None:
        probe = await self.probe(member)
        if not weights.expected and weights is self.weights:
            loop = asyncio.get_running_loop()
            member.check = check = ProbeCheck(probe, loop.create_future())
            self.changed.set()
            try:
                await check.verdict
            finally:
                if member.check is check:
                    member.check = None
        found = [probe.difference(expected) for expected in weights.expected]
        if found and (apart := min(found)) > self.tolerance:
            fact = f"gives log-probs {apart:.3g} away from the trainer's ({weights.label})"
            raise ServerError("verifying", member.url, fact)

    async def load(self, member: ServerState, weights: ServerWeights) -> None:
        """Load a version into a server, which wakes up if it sleeps."""
        client, seconds, before = member.client, self.deadline, member.label
        if not self.partial:
            await answered(member, seconds)
        member.reads = weights.version
        if member.asleep:
            await client.wake_up("weights", seconds=seconds)
        async with client.paused(mode="keep" if self.partial else "wait", seconds=seconds):
            if self.adapters:
                if before != weights.label:
                    await client.load_adapter(weights.label, str(weights.folder), seconds=seconds)
            elif before != weights.label or member.asleep:
                await fill(member, weights, seconds, self.say, self.group)
            await client.stamp(weights.label, seconds=seconds)
        if member.asleep:
            await client.wake_up("kv_cache", seconds=seconds)
            member.asleep = False
        said = await client.weight_version(seconds=seconds)
        if said != weights.label:
            fact = f"says that its weights are {said}, not {weights.label}"
            raise ServerError("reading the version back", client.url, fact)
        member.label = weights.label
        if self.adapters and before and before != weights.label:
            with suppress(ServerError):  # no request uses the older adapter
                await client.unload_adapter(before, seconds=seconds)

    async def probe(self, member: ServerState) -> LogprobProbe:
        """Sample greedily after the probe prompt; return the tokens and their log-probs."""
        how = greedy(Sampling(PROBE_TOKENS, ()), PROBE_TOKENS)
        request = CompletionRequest(Prompt(0, self.prompt, ""), range(1), how, 0)
        (completion,) = await self.ask(member, request)
        return LogprobProbe(
            self.prompt, list(completion.token_ids), list(completion.policy_logprobs)
        )

    def oldest_in_use(self) -> int:
        """The oldest version whose folder a server may still read."""
        assert self.weights is not None
        used = [m.reads for m in self.members if m.reads is not None]
        return min([*used, self.weights.version])
