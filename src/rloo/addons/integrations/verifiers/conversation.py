"""The tokens of conversations that an environment controls. Tokens are only appended, never
changed.

An environment that controls its rollouts sends the complete conversation for each turn. This module
compares it with the part of the conversation that is already stored: the model's turns keep their
sampled tokens, and new messages are appended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo.config.compat.generation_kwargs import stop_tokens
from rloo.episodes.renderer import ChatTemplate, Renderer
from rloo.episodes.renderer_check import find_renderer
from rloo.episodes.rollout_func import SampledTurn
from rloo.types import Message, sound

Schemas = Sequence[Mapping[str, Any]] | None


class ContextOverflow(ValueError):
    """Raised if a prompt, or the messages to the model, are too long for a further turn."""


@dataclass(slots=True)
class Conversation:
    """A conversation: its `messages`, their `text`, and its tokens. `trained` is 1 for tokens of
    the model. `raw` maps the index of a message to the model's text."""

    number: int
    prompt_ids: list[int]
    messages: list[Message]
    text: str
    token_ids: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw: dict[int, str] = field(default_factory=dict)

    def rendered(self) -> list[Message]:
        """The messages for a chat template, with the model's exact text."""
        said = [_rendered(m, self.raw.get(n), self.messages) for n, m in enumerate(self.messages)]
        return sound(said)


class IncrementalRenderer:
    """Converts conversations to tokens of a model and back. `refused` is the reason why the model's
    chat template does not support the given tools."""

    def __init__(self, trainer: Any) -> None:
        policy, args = trainer.policy, trainer.args
        self._tokenizer = policy.tokenizer
        self._ends = stop_tokens(args.generation_kwargs, policy.stop_token_ids)
        self._options = dict(args.chat_template_kwargs or {})
        self._dialects: dict[str, Renderer] = {}
        self._room, self._longest = args.max_completion_length, args.max_prompt_length
        self.refused: ValueError | None = None

    def begin(self, number: int, messages: list[Message], tools: Schemas) -> Conversation:
        """Begin a conversation with these messages. Raises ContextOverflow."""
        template = self._dialect(tools).template
        text = template.text(sound([_rendered(message, None, messages) for message in messages]))
        tokens = template.encode(text)
        if self._longest is not None and len(tokens) > self._longest:
            raise ContextOverflow(
                f"a prompt has {len(tokens)} tokens with its tools, and {self._longest} are "
                "allowed (max_prompt_length)"
            )
        return Conversation(number, tokens, messages, text)

    def tell(self, rollout: Conversation, messages: list[Message], tools: Schemas) -> None:
        """Append those of `messages` that are new to the rollout. Raises ValueError if `messages`
        do not begin with the messages of the rollout, and ContextOverflow if no tokens are left for
        a turn."""
        known, behind = len(rollout.messages), messages[len(rollout.messages) :]
        if messages[:known] != rollout.messages or not behind:
            raise ValueError(
                "the messages of a turn are no continuation of those before it, and tokens are "
                "only ever appended to"
            )
        dialect = self._dialect(tools)
        added = sound([_rendered(message, None, messages) for message in behind])
        if tools and all(message["role"] == "tool" for message in added):
            tokens = dialect.answer(rollout.token_ids, added)
        else:
            tokens = dialect.follow(rollout.rendered(), rollout.text, added)
        if len(rollout.token_ids) + len(tokens) >= self._room:
            raise ContextOverflow("what was said to the model leaves no room for a turn")
        rollout.messages = messages
        rollout.text += dialect.template.decode(tokens)
        rollout.token_ids += tokens
        rollout.trained += [0] * len(tokens)
        rollout.logprobs += [0.0] * len(tokens)

    def hear(self, rollout: Conversation, turn: SampledTurn, tools: Schemas) -> Message:
        """Append a turn of the model and return the turn as a message."""
        dialect = self._dialect(tools)
        text = dialect.template.decode(turn.token_ids)
        last = turn.token_ids[-1]
        end = dialect.template.decode([last]) if last in self._ends else ""
        raw, number = text.removesuffix(end), len(rollout.messages)
        message: Message = {"role": "assistant", "content": raw}
        if tools and turn.finish == "stop":
            said = dialect.read(turn.token_ids)
            if said.calls and all(call.fault is None for call in said.calls):
                named = [(call.name, json.dumps(call.arguments)) for call in said.calls]
                message = {k: v for k, v in said.message.items() if k != "tool_calls"}
                message["tool_calls"] = [
                    {"id": f"{rollout.number}-{number}-{n}", "name": name, "arguments": arguments}
                    for n, (name, arguments) in enumerate(named)
                ]
        rollout.raw[number] = raw
        rollout.messages = [*rollout.messages, plain(message)]
        rollout.text += text
        rollout.token_ids += turn.token_ids
        rollout.trained += [1] * len(turn.token_ids)
        rollout.logprobs += turn.policy_logprobs
        return message

    def _dialect(self, tools: Schemas) -> Renderer:
        """The renderer for these tools. Raises ValueError if the chat template supports none."""
        name = json.dumps(tools)
        if name not in self._dialects:
            self._dialects[name] = self._found(tools)
        return self._dialects[name]

    def _found(self, tools: Schemas) -> Renderer:
        if not tools:  # without tools there are no tool calls to parse
            template = ChatTemplate(self._tokenizer, self._options)
            return Renderer(template, {}, opening="", end=self._ends[0])
        try:
            options = {**self._options, "tools": list(tools)}
            return find_renderer(self._tokenizer, self._ends, options)
        except ValueError as error:
            self.refused = error
            raise


def plain(message: Mapping[str, Any]) -> Message:
    """A message with only the parts that are compared, and its content as text. Raises ValueError
    for images."""
    parts = message.get("content") or ""
    if not isinstance(parts, str):
        if any(part.get("type") != "text" for part in parts):
            raise ValueError(
                "a message has other parts than texts, which are not read in this version"
            )
        parts = "".join(part["text"] for part in parts)
    kept = {name: message[name] for name in ("tool_calls", "tool_call_id") if message.get(name)}
    return {"role": message["role"], "content": parts, **kept}


def _rendered(message: Message, raw: str | None, messages: Sequence[Message]) -> Message:
    """A message for a chat template, with the model's raw text or the name of a tool."""
    shown: Message = {"role": message["role"], "content": message["content"]}
    if raw is not None:
        shown["content"] = raw
    elif message["role"] == "tool":
        calls = [call for m in messages for call in m.get("tool_calls", ())]
        asked = message.get("tool_call_id")
        shown["name"] = next((call["name"] for call in calls if call["id"] == asked), "tool")
    elif "tool_calls" in message:
        shown["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    return shown
