"""Converts between tokens and messages: parses the tool calls in a turn's tokens, and renders
replies as tokens to append.

Existing tokens are never rendered again. The appended tokens are those that the chat template
places after a turn. At the start, `renderer_check.py` verifies that appended rows equal the chat
template's rendering.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.types import Message, sound

# Errors of parsing untrusted text: json's errors, a missing placeholder, a value of another shape
# than the template expects, brackets nested too deep.
_NO_CALL = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Inserted into the name of a special token, this mark turns the name into ordinary text. The mark
# is a Unicode noncharacter, which no text should contain.
_MARK = "\ufdd0"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it. `fault` is the reason why the call cannot be made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One turn of the model: its message and the calls in it."""

    message: Message
    calls: list[ToolCall]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a tokenizer with a run's arguments; `options` contains the tools."""

    tokenizer: PreTrainedTokenizerBase
    options: dict[str, Any]

    def text(self, messages: Sequence[Message], *, opens: bool = True) -> str:
        """The conversation as text. With `opens`, the text ends with the start of the model's
        turn."""
        rendered = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=opens, tokenize=False, **self.options
        )
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """The tokens of a part of a conversation; names of special tokens become special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, including the names of special tokens."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    @property
    def name(self) -> str:
        """The tokenizer's name in error messages."""
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__


# A user message in conversations that are rendered only for the tokens of replies, which do not
# depend on this message.
ASKED: Message = {"role": "user", "content": "x"}


class Renderer:
    """Parses and renders the turns of one model. `schema` is the model's response template,
    `opening` is the text with which the chat template opens a turn, and `end` is the token that
    ends a turn."""

    def __init__(
        self, template: ChatTemplate, schema: dict[str, Any], *, opening: str, end: int
    ) -> None:
        self.template = template
        self.schema = schema
        self.opening = opening
        self.end = end
        self._end_text = template.decode([end])
        added = template.tokenizer.get_added_vocab()
        # Added tokens that consist of spaces are ordinary text.
        names = {name: token for name, token in added.items() if len(name) > 1 and name.strip()}
        self._special = frozenset(names.values())
        # Longest first: one name may begin with another.
        longest = sorted(map(re.escape, names), key=len, reverse=True)
        self._names = re.compile("|".join(longest) or r"(?!)")
        self._before = len(template.text([ASKED]))
        self._specials_of: dict[int, int] = {}

    def read(self, token_ids: Sequence[int]) -> ParsedTurn:
        """The message and the calls of one turn. A turn that the schema cannot parse becomes a
        plain message, and one call with a `fault`."""
        text = self.template.decode(token_ids)
        try:
            message = sound(
                self.template.tokenizer.parse_response(
                    text, self.schema, prefix=self.opening, tools=self.template.options["tools"]
                )
            )
            calls = [_read_call(given) for given in message.pop("tool_calls", ())]
        except _NO_CALL as error:
            said = {"role": "assistant", "content": text.removesuffix(self._end_text)}
            return ParsedTurn(
                said, [ToolCall("unknown", fault=f"the call cannot be read: {error}")]
            )
        message.setdefault("content", "")
        made = [_wrapped(call.name, call.arguments) for call in calls if call.fault is None]
        return ParsedTurn(message | ({"tool_calls": made} if made else {}), calls)

    def answer(self, said: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens that follow a turn with the tokens `said`: the rest of that turn, the tools'
        `messages`, and the opening of the next turn. Names of special tokens in a message are
        encoded as text."""
        tokens = self._behind(messages)
        if len(messages) not in self._specials_of:
            plain = self._behind([message | {"content": "x"} for message in messages])
            self._specials_of[len(messages)] = self._count_special(plain)
        if self._count_special(tokens) != self._specials_of[len(messages)]:
            # A tokenizer may also map other characters, such as fullwidth ones, to special tokens.
            tokens = self._behind([m | {"content": "(no text)"} for m in messages])
        return tokens[1:] if said[-1] == self.end else tokens

    def follow(
        self, before: Sequence[Message], said: str, messages: Sequence[Message]
    ) -> list[int]:
        """The tokens of `messages` after the conversation `before`, and of the opening of the next
        turn. `said` is the rendered text of `before`. Raises ValueError if the template renders
        `before` differently when `messages` follow. Names of special tokens in `messages` are
        encoded as text."""
        inert = [message | {"content": self._inert(message["content"])} for message in messages]
        text = self.template.text([*before, *inert])
        if not text.startswith(said):
            raise ValueError(
                f"the chat template of {self.template.name} renders what was said in another way "
                "once more was said; what a model is trained on would not be what it sees later "
                "(chat_template gives it another one)"
            )
        parts = text[len(said) :].split(_MARK)
        return [token for part in parts for token in self.template.encode(part)]

    def _behind(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the template renders after a turn with these replies, from its end
        token."""
        turn = {"role": "assistant", "content": "", "tool_calls": [_wrapped(messages[0]["name"])]}
        inert = [message | {"content": self._inert(message["content"])} for message in messages]
        text = self.template.text([ASKED, turn, *inert])
        text = text[text.index(self._end_text, self._before) :]
        return [token for part in text.split(_MARK) for token in self.template.encode(part)]

    def _inert(self, text: str) -> str:
        """`text` with a mark inside the name of every special token."""
        text, parts, begin = text.replace(_MARK, ""), [], 0
        while match := self._names.search(text, begin):
            # Continue inside the match: another name may begin there.
            parts.append(text[begin : match.start() + 1])
            begin = match.start() + 1
        return _MARK.join([*parts, text[begin:]])

    def _count_special(self, token_ids: Sequence[int]) -> int:
        return sum(token in self._special for token in token_ids)


def _read_call(given: Any) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    function = function if isinstance(function, dict) else {}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return ToolCall("unknown", fault="a call needs a name and arguments")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(name, fault=f"the arguments of a call are an object, not a {kind}")
    return ToolCall(name, arguments)


def _wrapped(name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}
