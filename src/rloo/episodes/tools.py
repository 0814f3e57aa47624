"""The functions that a model may call: what it is told of them, and how they are called."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.utils import get_json_schema

from rloo.episodes.dialect import Call
from rloo.rewards.coroutines import LoopThread
from rloo.rewards.deadline import DeadlinePassed, call_within_reward_timeout


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call: its text, whether that is an error, and the seconds that it took. The
    text is None where the call did not end in time."""

    text: str | None
    is_error: bool
    seconds: float = 0.0


class Tools:
    """Functions by name. Of a text of more than `characters` the head and the tail are kept."""

    def __init__(self, functions: Sequence[Callable[..., Any]], *, characters: int) -> None:
        self._characters = characters
        self.functions = {_name_of(function): function for function in functions}
        if len(self.functions) < len(functions):
            names = ", ".join(map(_name_of, functions))
            raise ValueError(f"tools are called by name, and two have the same: {names} (tools)")
        self.schemas = [_schema_of(function) for function in functions]
        self._loop: LoopThread | None = None

    def call(self, calls: Sequence[tuple[Call, float]]) -> list[Answer]:
        """Make each call within so many seconds: first the functions, one after another, then the
        coroutine functions, all at the same time."""
        answers: dict[int, Answer] = {}
        waiting: dict[int, tuple[Callable[[], Any], float]] = {}
        for number, (call, seconds) in enumerate(calls):
            if (fault := self._fault_of(call)) is not None:
                answers[number] = self._error(fault)
                continue
            function = partial(self.functions[call.name], **call.arguments)
            if _is_coroutine(function.func):
                waiting[number] = function, seconds
            else:
                answers[number] = self._call(function, seconds)
        return [value for _, value in sorted((answers | self._call_together(waiting)).items())]

    def _fault_of(self, call: Call) -> str | None:
        """Why a call cannot be made."""
        if call.fault is not None:
            return call.fault
        if call.name not in self.functions:
            return f"there is no tool {call.name!r}; there are {', '.join(self.functions)}"
        try:
            inspect.signature(self.functions[call.name]).bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}: {error}"
        return None

    def _call(self, function: Callable[[], Any], seconds: float) -> Answer:
        began = time.perf_counter()
        try:
            result = call_within_reward_timeout(seconds, function)
            text, is_error = self._cut(_text_of(result)), False
        except DeadlinePassed:
            return Answer(None, True, time.perf_counter() - began)
        except (Exception, SystemExit) as error:  # whatever a tool raises, the model is told
            text, is_error = self._cut(_describe(error)), True
        return Answer(text, is_error, time.perf_counter() - began)

    def _call_together(
        self, waiting: Mapping[int, tuple[Callable[[], Any], float]]
    ) -> dict[int, Answer]:
        if not waiting:
            return {}
        self._loop = self._loop or LoopThread()
        calls = {str(number): partial(self._await, *call) for number, call in waiting.items()}
        longest = max(seconds for _, seconds in waiting.values())
        # A coroutine that blocks the loop is given up with it.
        done, late = self._loop.run(calls, longest + 1.0, lambda _: nullcontext())
        if late and not self._loop.responds():
            self._loop.close()
            self._loop = None
        found = {int(name): future.result() for name, future in done.items()}
        return found | {int(name): Answer(None, True, longest) for name in late}

    async def _await(self, function: Callable[[], Any], seconds: float) -> Answer:
        began = time.perf_counter()
        task = asyncio.ensure_future(function())
        await asyncio.wait({task}, timeout=seconds)
        passed = time.perf_counter() - began
        if not task.done():
            task.cancel()
            return Answer(None, True, passed)
        try:
            return Answer(self._cut(_text_of(task.result())), False, passed)
        except (Exception, asyncio.CancelledError) as error:
            return Answer(self._cut(_describe(error)), True, passed)

    def _error(self, text: str) -> Answer:
        return Answer(self._cut(f"error: {text}"), True)

    def _cut(self, text: str) -> str:
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
    try:
        return get_json_schema(function)
    except Exception as error:  # of several modules of transformers, one for each kind of fault
        raise ValueError(
            f"the tool {_name_of(function)!r} cannot be described to a model: {error} It needs "
            "type hints, and a docstring that tells of each argument under `Args:` (tools)"
        ) from error


def _is_coroutine(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _text_of(result: Any) -> str:
    return result if isinstance(result, str) else str(result)


def _describe(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # a user's own __str__ may raise anything
        said = ""
    return f"error: {type(error).__name__}: {said}"
