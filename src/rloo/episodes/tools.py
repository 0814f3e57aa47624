"""The tools of a model, their schemas and their replies. Tools are functions and the methods of an
environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils import get_json_schema

from rloo.episodes.renderer import ToolCall
from rloo.episodes.tool_executor import Asked, EpisodeLost, ToolExecutor, ToolResult
from rloo.types import sound


@dataclass(frozen=True, slots=True)
class ToolReply:
    """The reply to a tool call: its text, whether the text is an error, and the seconds of the
    call. The text is None if the call did not end in time, or if the episode is lost; `lost` is
    then the reason."""

    text: str | None
    is_error: bool
    seconds: float = 0.0
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call with its time limit in seconds, and its episode's environment, if there is
    one."""

    call: ToolCall
    seconds: float
    environment: Any = None


class ToolSet:
    """The tools that a model can call by name: functions, and the `methods` of an environment
    (`example` is an environment of this class). A reply of more than `characters` characters is cut
    to its start and its end."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        characters: int,
        example: Any = None,
        methods: Sequence[str] = (),
    ) -> None:
        self._characters, self._methods, self._caller = characters, list(methods), ToolExecutor()
        self.functions: dict[str, Callable[..., Any]] = {
            _name_of(function): function for function in functions
        }
        names = [*map(_name_of, functions), *methods]
        if len(set(names)) < len(names):
            raise ValueError(
                f"tools are called by name, and two have the same: {', '.join(names)} (tools, "
                "environment_factory)"
            )
        self.names = names
        described = [*functions, *(getattr(example, name) for name in methods)]
        self.schemas: list[dict[str, Any]] = [_schema_of(function) for function in described]

    def call(self, requests: Sequence[ToolRequest]) -> list[ToolReply]:
        """The replies to the calls. Plain functions run one after another, then coroutine functions
        run concurrently."""
        faults = [self._fault_of(request) for request in requests]
        asked: list[Asked] = [
            (partial(self._function(request), **request.call.arguments), request.seconds)
            for request, fault in zip(requests, faults, strict=True)
            if fault is None
        ]
        outcomes = iter(self._caller.call(asked))
        return [
            self._answer(next(outcomes)) if fault is None else self._error(fault)
            for fault in faults
        ]

    def _function(self, request: ToolRequest) -> Callable[..., Any]:
        name = request.call.name
        found: Callable[..., Any] = self.functions.get(name) or getattr(request.environment, name)
        return found

    def _fault_of(self, request: ToolRequest) -> str | None:
        """The reason why a call cannot be made, or None."""
        call = request.call
        if call.fault is not None:
            return call.fault
        if call.name not in self.names:
            return f"there is no tool {call.name!r}; there are {', '.join(self.names)}"
        try:
            inspect.signature(self._function(request)).bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}"
        return None

    def _answer(self, outcome: ToolResult) -> ToolReply:
        if outcome.late:
            return ToolReply(None, True, outcome.seconds)
        if isinstance(outcome.error, EpisodeLost):
            return ToolReply(None, True, outcome.seconds, _text_of(outcome.error))
        if outcome.error is not None:
            kind, said = type(outcome.error).__name__, _text_of(outcome.error)
            return ToolReply(self._cut(f"error: {kind}: {said}"), True, outcome.seconds)
        return ToolReply(self._cut(_text_of(outcome.value)), False, outcome.seconds)

    def _error(self, text: str) -> ToolReply:
        return ToolReply(self._cut(f"error: {text}"), True)

    def _cut(self, text: str) -> str:
        text = sound(text)
        if len(text) <= self._characters:
            return text
        head, tail = (self._characters + 1) // 2, self._characters // 2
        left_out = f"\n[... {len(text) - self._characters:,} characters ...]\n"
        return text[:head] + left_out + text[len(text) - tail :]


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ValueError(f"the tool {function!r:.60} is no function with a name (tools)")
    return str(name)


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    given: dict[str, Any] | None = getattr(function, "json_schema", None)
    if given is not None:  # a server's own schema (OpenEnv)
        return given
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers raises errors of several modules
        raise ValueError(
            f"the tool {_name_of(function)!r} cannot be described to a model: {error} It needs "
            "type hints, and a docstring that tells of each argument under `Args:` (tools)"
        ) from error


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # a user's __str__ may raise anything
        return ""
