"""The servers of a run: loading weights, sampling, detecting failures and recovering from them.

All code of the pool runs in one event loop. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo.engines.vllm.client import ServerError
from rloo.engines.vllm.requests import CompletionRequest, read_answer
from rloo.engines.vllm.router import LoadBalancer
from rloo.engines.vllm.server_process import LOOK_SECONDS, found_again
from rloo.engines.vllm.server_state import (
    LogprobProbe,
    ServerReply,
    ServerState,
    ServerWeights,
    WaitClock,
    cancel_all,
    cancel_others,
)
from rloo.engines.vllm.weight_loading import WeightLoader
from rloo.types import Completion

# Seconds between health checks, and the number of failed checks after which a server is lost.
LOOK_EVERY, LOOKS = 5.0, 3
# Seconds by which the delay before each further attempt to recover a server grows.
PATIENCE = 1.0


@dataclass(slots=True)
class ServerPool:
    """All servers of a run. `deadline` is the time limit, in seconds, of a request and of loading
    weights. `start_deadline` is the time limit of a server's start. A server is recovered at most
    `budget` times in a run. With `adapters`, weights are LoRA adapters. `tolerance` is the largest
    accepted `LogprobProbe.difference`."""

    members: list[ServerState]
    deadline: float
    start_deadline: float
    budget: int
    adapters: bool
    tolerance: float
    prompt: list[int]
    say: Callable[[str], None]
    examine: Callable[[ServerState], Coroutine[Any, Any, None]]
    vocabulary: int
    # The model that our servers are started with, if it is not the newest version.
    base: Path | None = None
    # See `rloo.engines.vllm.settings.VLLMSettings`.
    sleep_level: int | None = None
    # Whether running completions continue with new weights; if not, loading waits for them.
    partial: bool = False
    # With prefix caching: the server that sampled and cached each completion's last turn.
    homes: dict[tuple[int, int], ServerState] | None = None
    closed: bool = False
    sampling: int = 0
    # Set while servers may use GPU memory.
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    looking: list[asyncio.Task[None]] = field(default_factory=list)
    watch: WaitClock = field(default_factory=WaitClock)
    places: LoadBalancer = field(init=False)
    loader: WeightLoader = field(init=False)
    counts: dict[str, float] = field(
        default_factory=lambda: {"engine/lost": 0.0, "engine/returned": 0.0, "engine/repeated": 0.0}
    )

    def __post_init__(self) -> None:
        self.places = LoadBalancer(self.members)
        self.loader = WeightLoader(
            self.members,
            self.places,
            self.deadline,
            self.adapters,
            self.partial,
            self.tolerance,
            self.prompt,
            self.say,
            self._ask,
            self._lose,
        )
        if self.sleep_level is None:
            self.awake.set()

    @property
    def live(self) -> list[ServerState]:
        """The servers without a fault."""
        return [member for member in self.members if member.fault is None]

    # -- weights ---------------------------------------------------------------------------------

    async def bring(
        self, weights: ServerWeights, *, everyone: bool = False
    ) -> dict[str, LogprobProbe]:
        """See `WeightLoader.bring`. With a `sleep_level`, all servers load the version, and none
        sleeps while another loads."""
        self.awake.set()
        return await self.loader.bring(weights, everyone=everyone or self.sleep_level is not None)

    async def release(self) -> None:
        """See `WeightLoader.release`."""
        self.loader.release()

    # -- sampling --------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[CompletionRequest]) -> list[list[Completion]]:
        """The completions of every request. Requests of a failed server are repeated on the others.
        With a `sleep_level`, servers sleep before and after the call."""
        tasks: list[asyncio.Task[Any]] = []
        answers: dict[int, ServerReply] = {}
        try:
            await self.begin()
            while missing := [n for n in range(len(requests)) if n not in answers]:
                asking = [asyncio.create_task(self._serve(requests[n])) for n in missing]
                tasks += asking
                answers |= zip(missing, await asyncio.gather(*asking), strict=True)
                good = await self._confirmed(answers.values())
                self.counts["engine/repeated"] += len(answers) - len(good)
                answers = {n: answer for n, answer in answers.items() if answer in good}
            return [answers[n].completions for n in range(len(requests))]
        finally:
            await cancel_all(tasks)
            await self.end()

    async def begin(self) -> None:
        """Count a caller that samples, until `end`. The first caller wakes the servers and starts
        their monitoring."""
        self.sampling += 1
        if self.sampling == 1:
            self.awake.set()
            self.watch.start()
            self.looking = [asyncio.create_task(self._look(member)) for member in self.members]
            await self._each(self._wake)

    async def end(self) -> None:
        """Count a caller that has finished. After the last caller the servers may sleep."""
        self.sampling -= 1
        if self.sampling == 0:
            self.watch.stop()
            await cancel_all(self.looking)
            if self.sleep_level is not None:
                self.awake.clear()
            if not self.closed:  # else these servers are about to be stopped
                await self._each(self._sleep)

    async def _confirmed(self, answers: Iterable[ServerReply]) -> list[ServerReply]:
        """The answers of servers that had the right weights. A server that was restarted outside of
        the run meanwhile is lost."""
        answers = list(answers)
        for member in {id(a.member): a.member for a in answers}.values():
            # A server that is loading weights has answered all requests, and is verified after
            # loading.
            asked = not member.tells and member.is_usable
            if asked and not await self._is_well(member) and member.is_usable:
                fact = f"has lost {member.label} while it sampled"
                self._lose(member, ServerError("sampling", member.url, fact))
        return [a for a in answers if a.member.tells or a.losses == a.member.losses]

    async def _each(
        self,
        do: Callable[[ServerState], Coroutine[Any, Any, None]],
        members: Sequence[ServerState] | None = None,
    ) -> None:
        """Call `do` for all live servers, or for `members`. A server that fails is lost."""

        async def one(member: ServerState) -> None:
            try:
                await do(member)
            except ServerError as error:
                self._lose(member, error)

        await asyncio.gather(*map(one, self.live if members is None else members))

    async def _wake(self, member: ServerState) -> None:
        if member.asleep:
            assert self.loader.weights is not None
            await self.loader.load(member, self.loader.weights)

    async def _sleep(self, member: ServerState) -> None:
        if self.sleep_level is not None and not member.asleep:
            try:
                await member.client.sleep(self.sleep_level, seconds=self.deadline)
            except ServerError:
                if member.own is not None:  # the trainer needs the memory now
                    await asyncio.to_thread(member.own.stop)
                raise
            member.asleep = True

    async def _serve(self, request: CompletionRequest) -> ServerReply:
        completions, again = len(request.numbers), False
        row = request.prompt.noise_id, request.numbers.start
        while True:
            near = self.homes.get(row) if self.homes else None
            member = await self.places.take(completions, again=again, near=near)
            if self.homes is not None:
                self.homes[row] = member
            call = asyncio.create_task(self._ask(member, request))
            member.calls[call] = self.loader.labels[member.label]
            try:
                losses = member.losses
                return ServerReply(member, losses, await call)
            except ServerError as error:
                if error.is_refusal and await self._is_well(member):
                    raise
                self._lose(member, error)
            except asyncio.CancelledError:
                ours = asyncio.current_task()
                if member.fault is None or (ours is not None and ours.cancelling()):
                    call.cancel()
                    raise
            finally:
                member.calls.pop(call, None)
                self.places.remove_server(member, completions)
            again = True
            self.counts["engine/repeated"] += 1

    async def _ask(self, member: ServerState, request: CompletionRequest) -> list[Completion]:
        client, route, label = member.client, member.route, member.label
        labels = self.loader.labels
        known = {label: labels[label]}
        body = request.body(route, model=label if self.adapters else None, salt=label)
        answer = await client.post(route, body, phase="sampling", seconds=self.deadline)
        if self.partial:  # newer weights may have continued the completion
            labels = self.loader.labels
            known |= {name: v for name, v in labels.items() if v > known[label]}
        return read_answer(
            answer, request, url=client.url, versions=known, vocabulary=self.vocabulary
        )

    async def _is_well(self, member: ServerState) -> bool:
        """Whether a server has the expected weights. A server that was restarted outside of the run
        has not."""
        try:
            return await member.client.weight_version(seconds=LOOK_SECONDS) == member.label
        except ServerError:
            return False

    async def _look(self, member: ServerState) -> None:
        """Monitor a server's health until this task is cancelled. A server that hangs, or whose
        process is gone, is marked as lost before its requests reach their deadline."""
        missed = 0
        while True:
            await asyncio.sleep(LOOK_EVERY if missed == 0 else 1.0)
            if member.fault is not None:
                continue
            try:
                await member.client.get("/health", phase="looking after it", seconds=LOOK_SECONDS)
                missed = 0
            except ServerError as error:
                missed += 1
                if missed == LOOKS:
                    missed = 0
                    self._lose(member, error)

    # -- failures --------------------------------------------------------------------------------

    def lose(self, url: str, fact: str) -> None:
        """Mark the server `url` as lost, for the reason `fact`."""
        for member in self.members:
            error = ServerError("verifying", url, fact)
            if member.url == url and not self.loader.reject(member, error):
                self._lose(member, error)

    def _lose(self, member: ServerState, error: ServerError) -> None:
        if member.fault is not None or self.closed:
            return
        member.fault = str(error)
        member.losses += 1
        self.counts["engine/lost"] += 1
        for call in member.calls:
            call.cancel()
        member.recovery = asyncio.create_task(self._recover(member))
        member.recovery.add_done_callback(self._deal)
        self.loader.changed.set()
        self.say(f"{error}; it is out, and what it had not finished goes to the others")

    def _deal(self, _: asyncio.Task[None]) -> None:
        self.places.deal()
        self.loader.changed.set()

    async def _recover(self, member: ServerState) -> None:
        """Recover a server with the newest weights. A server of the run is restarted; a server of
        the user is awaited. If the budget is exhausted, the server keeps its fault."""
        member.reads = None
        while member.tries < self.budget:
            member.tries += 1
            await asyncio.sleep(PATIENCE * (member.tries - 1))
            await self.awake.wait()
            try:
                await self._restart(member)
                await self.examine(member)
                await self.loader.update(member)
            # All errors are caught, since no other code would report an error of this task.
            except (OSError, ValueError, RuntimeError) as error:
                member.fault, member.reads = str(error), None
                continue
            member.fault = None
            if not self.sampling:
                await self._each(self._sleep, [member])
            self.places.restore_server(member)
            self.counts["engine/returned"] += 1
            self.say(f"the vLLM server {member.url} is back, with {member.label}")
            return

    async def _restart(self, member: ServerState) -> None:
        member.label, member.asleep = "", False
        weights = self.loader.weights
        assert weights is not None
        if member.own is None:
            await found_again(member.client, self.start_deadline)
            if self.adapters:
                with suppress(ServerError):  # the server may have the adapter
                    await member.client.unload_adapter(weights.label, seconds=self.deadline)
            return
        await member.client.close()
        member.reads = None if self.base else weights.version
        folder = self.base or weights.complete or weights.folder
        await asyncio.to_thread(member.own.start, str(folder))
        member.client = await member.own.wait(self.start_deadline)

    # -- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel everything that runs in this event loop, and close the connections. Servers that
        the run started keep running."""
        self.closed = True
        # A cancelled request makes room for a waiting one. That one must not open a connection.
        await cancel_others()
        for member in self.members:
            with suppress(Exception):
                await member.client.close()
