"""Environments of `verifiers`: they play their rollouts themselves, and where they would ask a
server for a turn of the model's, they ask our engine.

An environment deals in messages, training in tokens. Those of a rollout are only ever appended to:
the model's turns as they were sampled, and what the chat template puts behind them. A rollout whose
messages are something else than that has failed.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from verifiers.clients import Client
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

# Seconds within which another rollout may ask, so that both are sampled together.
_GATHERS = 0.02
REWARD = "verifiers_reward"


class VerifiersEnvironment:
    """A `rollout_func` that has an environment play a rollout for each prompt, all of them at the
    same time."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.__name__ = environment.env_id or type(environment).__name__
        # Kept, since what an environment opens belongs to the loop in which it was opened.
        self._loop: LoopThread | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> Mapping[str, Any]:
        """What the rollouts are in tokens, and their rewards. Raises ValueError for a model whose
        chat template is not fit for the environment's tools."""
        self._loop = self._loop or LoopThread()
        asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        speech = IncrementalRenderer(trainer)
        groups = self._groups(trainer.engine.rows)
        clients = [EngineClient(speech, asked, [n for n, _ in own]) for own in groups]
        over = self._loop.submit(self._play([[row for _, row in own] for own in groups], clients))
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
        """The rows with their numbers: those that are scored together."""
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
        except Exception as error:  # whatever an environment raises
            return [{FAILED: f"the environment raised {error!r:.200}"} for _ in rows]
        return [_ended(each, client.rollouts.get(each["trajectory_id"])) for each in played]


def _ended(played: Mapping[str, Any], rollout: Conversation | None) -> dict[str, Any]:
    """What a rollout came to."""
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
    """A turn that a rollout waits for, in its loop."""

    row: Prompt
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[SampledTurn]

    def tell(self, turn: SampledTurn) -> None:
        self.loop.call_soon_threadsafe(self._tell, turn)

    def _tell(self, turn: SampledTurn) -> None:
        if not self.answer.done():  # where the environment has not given up waiting
            self.answer.set_result(turn)


def _waiting(asked: queue.SimpleQueue[_Asked], over: Future[Any]) -> list[_Asked]:
    """Those that wait for a turn: at least one, until all is over."""
    waiting: list[_Asked] = []
    while not over.done():
        try:
            waiting.append(asked.get(timeout=_GATHERS))
        except queue.Empty:
            if waiting:
                break
    return waiting


class EngineClient(Client):  # type: ignore[misc, unused-ignore]
    """The model, as an environment asks for it, in the rollouts with these numbers. Messages and
    tools are plain dicts here, and a response is that of `verifiers`."""

    def __init__(
        self, speech: IncrementalRenderer, asked: queue.SimpleQueue[_Asked], numbers: Sequence[int]
    ) -> None:
        super().__init__(None)
        self._speech, self._asked, self._numbers = speech, asked, iter(numbers)
        self.rollouts: dict[str, Conversation] = {}

    async def get_native_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **given: Any
    ) -> Response:
        """The next turn of the rollout whose `state` is given. Raises ValueError for messages that
        are no continuation of it."""
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
        except ContextOverflow as error:  # which ends a rollout, and is no failure
            raise OverlongPromptError(str(error)) from error
        return self.rollouts[name]

    async def to_native_prompt(self, messages: Any) -> tuple[list[Message], dict[str, Any]]:
        """As dicts."""
        return [plain(message.model_dump(exclude_none=True)) for message in messages], {}

    async def to_native_tool(self, tool: Any) -> dict[str, Any]:
        """As chat templates have it."""
        parts = ("name", "description", "parameters")
        return {"type": "function", "function": {name: getattr(tool, name) for name in parts}}

    async def from_native_response(self, response: Any) -> Any:
        """The same."""
        return response

    async def raise_from_native_response(self, response: Any) -> None:
        """None is wrong: an empty turn is the model's."""

    def setup_client(self, config: Any) -> None:
        """Nothing is connected."""

    async def close(self) -> None:
        """Nothing is open."""


def _response(rollout: Conversation, turn: SampledTurn, message: Message, begun: int) -> Response:
    """A turn of so many tokens and their `begun` ones before, as `verifiers` has it."""
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
