"""Finds the renderer of a model and verifies it before the first sample: the chat template must
render calls and replies to the tokens that an episode would append.

The input of each turn should be the template's rendering of the conversation so far. Appended rows
equal this rendering if the input of each turn is a prefix of the input of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rloo.episodes.renderer import ASKED, ChatTemplate, Renderer, ToolCall
from rloo.episodes.response_templates import FORMATS
from rloo.types import Message

_CALLS = [
    ToolCall("look_up", {"place": "Paris", "day": "Monday"}),
    ToolCall("look_up", {"place": "Rome"}),
]
_ANSWERS = ["17 degrees", 'a\nb: {"c": [1, 2]}']
_CHAT_TEMPLATE = "(chat_template gives it another one)"


def find_renderer(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], options: dict[str, Any]
) -> Renderer:
    """The renderer of a tokenizer whose chat template gets these `options`, including the tools.
    Raises ValueError, with the tokenizer's name, if the template omits calls or replies, writes
    calls in an unknown format, or later renders earlier messages differently."""
    template = ChatTemplate(tokenizer, options)
    if not tokenizer.chat_template:
        raise ValueError(
            f"{template.name} has no chat template, and what tools say reaches a model by that "
            "(chat_template)"
        )
    try:
        seen = _seen(template)
    except _Rewritten:
        # A model that always reasons first has no turns without reasoning.
        seen = _seen(template, reasoning_content="So.")
    turns = [_turn(template, *both, stop_token_ids) for both in pairwise(seen)]
    end = template.encode(turns[0])[-1]
    opening = seen[0].removeprefix(template.text([ASKED], opens=False))
    for schema in _schemas(tokenizer):
        dialect = Renderer(template, schema, opening=opening, end=end)
        if _reads(dialect, turns):
            _prove(dialect, seen, turns)
            return dialect
    raise ValueError(
        f"the chat template of {template.name} writes a call as {turns[0]!r}, which none of the "
        f"known formats reads ({', '.join(FORMATS)}); set tokenizer.response_template, as "
        "transformers' parse_response takes it (processing_class)"
    )


class _Rewritten(ValueError):
    """A template later renders earlier messages differently."""


def _seen(template: ChatTemplate, **thought: str) -> list[str]:
    """The inputs of three turns, the first two of which call a tool."""
    conversation: list[Message] = [ASKED]
    seen = [template.text(conversation)]
    for call, answer in zip(_CALLS, _ANSWERS, strict=True):
        wrapped = {"name": call.name, "arguments": call.arguments}
        turn = {"role": "assistant", "content": "", "tool_calls": [_function(wrapped)], **thought}
        conversation += [turn, {"role": "tool", "name": call.name, "content": answer}]
        try:
            seen.append(template.text(conversation))
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template of {template.name} refuses a call and its answer: {error} "
                f"{_CHAT_TEMPLATE}"
            ) from error
        for what in (call.name, *call.arguments.values(), answer.split("\n")[0]):
            if what not in seen[-1]:
                raise ValueError(
                    f"the chat template of {template.name} does not show calls and answers of "
                    f"tools: {what!r} is left out {_CHAT_TEMPLATE}"
                )
    for before, after in pairwise(seen):
        if not after.startswith(before):
            both = enumerate(zip(before, after, strict=False))
            place = next((n for n, (a, b) in both if a != b), len(after)) - 8
            raise _Rewritten(
                f"the chat template of {template.name} renders what was said in another way once "
                f"more was said: {before[place:][:40]!r} becomes {after[place:][:40]!r}; what a "
                f"model is trained on would not be what it sees later {_CHAT_TEMPLATE}"
            )
    return seen


def _function(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _turn(template: ChatTemplate, before: str, after: str, stop_token_ids: Sequence[int]) -> str:
    """The model's turn between the inputs `before` and `after`, with the token that ends it."""
    said = after[len(before) :]
    ends = [template.decode([token]) for token in stop_token_ids]
    found = [said.index(end) + len(end) for end in ends if end and end in said]
    if not found:
        raise ValueError(
            f"the chat template of {template.name} ends a turn that calls a tool with none of the "
            f"tokens that end a completion ({', '.join(ends)}), so that the model could not wait "
            "for the answer (generation_kwargs: {eos_token_id: ...})"
        )
    return said[: min(found)]


def _schemas(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    own = getattr(tokenizer, "response_template", None)
    return list(FORMATS.values()) if own is None else [own]


def _reads(dialect: Renderer, turns: Sequence[str]) -> bool:
    read = [dialect.read(dialect.template.encode(turn)).calls for turn in turns]
    return read == [[call] for call in _CALLS]


def _prove(dialect: Renderer, seen: Sequence[str], turns: Sequence[str]) -> None:
    """Raise ValueError if an appended row differs from the template's rendering."""
    encode = dialect.template.encode
    row = encode(seen[0])
    for turn, answer, whole in zip(turns, _ANSWERS, seen[1:], strict=True):
        said = encode(turn)
        message = {"role": "tool", "name": _CALLS[0].name, "content": answer}
        row += said + dialect.answer(said, [message])
        if row != encode(whole):
            raise ValueError(
                f"with {dialect.template.name} the tokens of a turn and of an answer, one after "
                "the other, are not those of the conversation as a whole; what a model is trained "
                f"on would not be what it sees later {_CHAT_TEMPLATE}"
            )
