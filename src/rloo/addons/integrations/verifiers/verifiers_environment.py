"""Environments of `verifiers`. They control their rollouts, and request the model's turns from our
engine instead of a server.

An environment uses messages, training uses tokens. Tokens are only appended to a rollout: the
sampled tokens of the model's turns, and the chat template's tokens for further messages. A rollout
fails if its messages do not begin with the earlier ones.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from verifiers.errors import OverlongPromptError
from verifiers.types import Response, ResponseMessage, ResponseTokens, Usage

from rloo.addons.integrations.verifiers.conversation import (
    ContextOverflow,
    Conversation,
    IncrementalRenderer,
    plain,
)
from rloo.episodes.rollout_func import FAILED, MASK, SampledTurn
from rloo.rewards.async_functions import LoopThread
from rloo.types import Message, Prompt

if TYPE_CHECKING:

    class _Client:
        # The part of the base class that is used here: `verifiers` is optional and not typed.
        def __init__(self, client: object) -> None: ...

else:
    from verifiers.clients import Client as _Client

# Seconds to wait for further requests, so that they are sampled together.
_GATHERS = 0.02
REWARD = "verifiers_reward"


class VerifiersEnvironment:
    """A `rollout_func`. The environment runs one rollout for each prompt; all rollouts run
    concurrently."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.__name__: str = environment.env_id or type(environment).__name__
        # The event loop is reused, since the environment's connections belong to the loop that
        # opened them.
        self._loop: LoopThread | None = None
        self._starting = threading.Lock()

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Mapping[str, Any]:
        """The tokens and rewards of the rollouts. Raises ValueError if the model's chat template
        does not support the environment's tools."""
        with self._starting:  # with max_staleness there are several calls at the same time
            self._loop = loop = self._loop or LoopThread()
        asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        speech = IncrementalRenderer(trainer)
        groups = self._groups(trainer.engine.rows)
        clients = [EngineClient(speech, asked, [n for n, _ in own]) for own in groups]
        over = loop.submit(self._play([[row for _, row in own] for own in groups], clients))
        try:
            while waiting := _waiting(asked, over):
                turns = trainer.engine.go_on([one.row for one in waiting])
                for one, turn in zip(waiting, turns, strict=True):
                    one.tell(turn)
            played = over.result()
        finally:
            over.cancel()
        if speech.refused is not None:
            raise speech.refused
        return _as_lists([each for own in played for each in own])

    def _groups(self, rows: Sequence[Prompt]) -> list[list[tuple[int, Prompt]]]:
        """The rows with their numbers, in groups that are scored together."""
        numbered = list(enumerate(rows))
        if not self._environment.requires_group_rollouts:
            return [[one] for one in numbered]
        return [list(own) for _, own in groupby(numbered, key=lambda one: one[1].noise_id)]

    async def _play(
        self, groups: Sequence[list[Prompt]], clients: Sequence[EngineClient]
    ) -> list[list[dict[str, Any]]]:
        return list(await asyncio.gather(*map(self._group, groups, clients)))

    async def _group(self, rows: list[Prompt], client: EngineClient) -> list[dict[str, Any]]:
        inputs = [row.columns | {"prompt": row.content} for row in rows]
        try:
            played = await self._environment.run_group(
                inputs, client, "policy", {}, state_columns=["trajectory_id"]
            )
        except Exception as error:  # environments may raise any error
            return [{FAILED: f"the environment raised {error!r:.200}"} for _ in rows]
        return [_ended(each, client.rollouts.get(each["trajectory_id"])) for each in played]


def _ended(played: Mapping[str, Any], rollout: Conversation | None) -> dict[str, Any]:
    """The result of a rollout, or the reason for its failure."""
    if played.get("error"):
        return {FAILED: f"{played['error_chain']:.300}"}
    if rollout is None or not any(rollout.trained):
        return {FAILED: "the environment has not asked the model"}
    return {
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.token_ids,
        "logprobs": rollout.logprobs,
        MASK: rollout.trained,
        REWARD: played["reward"],
    }


def _as_lists(rollouts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = ("prompt_ids", "completion_ids", "logprobs", MASK, FAILED, REWARD)
    return {name: [rollout.get(name) for rollout in rollouts] for name in names}


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of a rollout for the model's next turn, with its event loop."""

    row: Prompt
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[SampledTurn]

    def tell(self, turn: SampledTurn) -> None:
        self.loop.call_soon_threadsafe(self._tell, turn)

    def _tell(self, turn: SampledTurn) -> None:
        if not self.answer.done():  # done if the environment has cancelled the request
            self.answer.set_result(turn)


def _waiting(asked: queue.SimpleQueue[_Asked], over: Future[Any]) -> list[_Asked]:
    """The waiting requests: at least one, or none if all rollouts are over."""
    waiting: list[_Asked] = []
    while not over.done():
        try:
            waiting.append(asked.get(timeout=_GATHERS))
        except queue.Empty:
            if waiting:
                break
    return waiting


class EngineClient(_Client):
    """The client with which an environment requests the model's turns. Each of its rollouts has a
    number. Messages and tools are plain dicts. A response is a `Response` of `verifiers`."""

    def __init__(
        self, speech: IncrementalRenderer, asked: queue.SimpleQueue[_Asked], numbers: Sequence[int]
    ) -> None:
        super().__init__(None)
        self._speech, self._asked, self._numbers = speech, asked, iter(numbers)
        self.rollouts: dict[str, Conversation] = {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **given: Any
    ) -> Response:
        """The next turn of the rollout in `state`. Raises ValueError if the messages do not
        continue it."""
        if sampling_args:
            raise ValueError(
                f"the environment asks for {sampling_args}; the run's options say how is sampled"
            )
        rollout = self._told(given["state"]["trajectory_id"], prompt, tools)
        loop = asyncio.get_running_loop()
        begin = [*rollout.prompt_ids, *rollout.token_ids]
        row = Prompt(rollout.number, begin, "", offset=len(rollout.token_ids))
        waits: asyncio.Future[SampledTurn] = loop.create_future()
        self._asked.put(_Asked(row, loop, waits))
        turn = await waits
        return _response(rollout, turn, self._speech.hear(rollout, turn, tools), len(begin))

    def _told(self, name: str, messages: list[Message], tools: Any) -> Conversation:
        if name not in self.rollouts:
            self.rollouts[name] = self._speech.begin(next(self._numbers), messages, tools)
            return self.rollouts[name]
        try:
            self._speech.tell(self.rollouts[name], messages, tools)
        except ContextOverflow as error:  # ends the rollout without a failure
            raise OverlongPromptError(str(error)) from error
        return self.rollouts[name]

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        """The messages as dicts."""
        return [plain(message.model_dump(exclude_none=True)) for message in messages], {}

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        parts = ("name", "description", "parameters")
        return {"type": "function", "function": {name: getattr(tool, name) for name in parts}}

    async def from_native_response(self, response: Any) -> Any:
        """The response, unchanged."""
        return response

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept every response. An empty turn is allowed."""

    def setup_client(self, config: Any) -> None:
        """Do nothing: there is no connection."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def _response(rollout: Conversation, turn: SampledTurn, message: Message, begun: int) -> Response:
    """A turn as a `verifiers` response; `begun` is the number of tokens before it."""
    length = len(turn.token_ids)
    tokens = ResponseTokens(
        prompt_ids=[*rollout.prompt_ids, *rollout.token_ids][:begun],
        prompt_mask=[0] * begun,
        completion_ids=turn.token_ids,
        completion_mask=[1] * length,
        completion_logprobs=turn.policy_logprobs,
    )
    calls = message.get("tool_calls")
    finish = "length" if turn.finish == "length" else "tool_calls" if calls else "stop"
    said = ResponseMessage(
        content=message["content"],
        reasoning_content=message.get("reasoning_content"),
        tool_calls=calls,
        finish_reason=finish,
        is_truncated=finish == "length",
        tokens=tokens,
    )
    usage = Usage(
        prompt_tokens=begun, reasoning_tokens=0, completion_tokens=length,
        total_tokens=begun + length,
    )  # fmt: skip
    name = f"{rollout.number}-{begun}"
    return Response(id=name, created=0, model="policy", usage=usage, message=said)
