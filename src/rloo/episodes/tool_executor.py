"""Calls of a user's functions, each within its time: one after another, or together where they are
coroutine functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rloo.rewards.async_functions import LoopThread, is_coroutine
from rloo.rewards.timeout import RewardTimeout, call_with_timeout

# Seconds that the loop has, beyond the deadline, to tell that a coroutine has missed it.
_TELLS = 1.0


class EpisodeLost(Exception):
    """Raised by a tool: its episode cannot go on, for no fault of the model's."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call: its value, or the error that it raised; or it was `late`, and has
    neither."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False
    seconds: float = 0.0


# A function without arguments, and the seconds that it may take.
Asked = tuple[Callable[[], Any], float]


class ToolExecutor:
    """Calls functions. Coroutine functions run in one event loop, which is kept between calls, and
    is that of all callers: a connection that `reset` has opened is used by tools, and closed."""

    _shared: ClassVar[LoopThread | None] = None

    def call(self, asked: Sequence[Asked]) -> list[ToolResult]:
        """First the functions, in their order, then the coroutine functions, at the same time."""
        waits = [is_coroutine(function) for function, _ in asked]
        found = {n: _call(*call) for n, call in enumerate(asked) if not waits[n]}
        found |= self._call_together({n: call for n, call in enumerate(asked) if waits[n]})
        return [outcome for _, outcome in sorted(found.items())]

    def _call_together(self, asked: dict[int, Asked]) -> dict[int, ToolResult]:
        if not asked:
            return {}
        loop = ToolExecutor._shared = ToolExecutor._shared or LoopThread()
        calls = {str(number): partial(_await, *call) for number, call in asked.items()}
        longest = max(seconds for _, seconds in asked.values())
        done, late = loop.run(calls, longest + _TELLS, lambda _: nullcontext())
        if late and not loop.responds():  # a coroutine that blocks it
            loop.close()
            ToolExecutor._shared = None
        found = {int(name): future.result() for name, future in done.items()}
        return found | {int(name): ToolResult(late=True, seconds=longest) for name in late}


def _call(function: Callable[[], Any], seconds: float) -> ToolResult:
    began = time.perf_counter()
    try:
        value = call_with_timeout(seconds, function)
    except RewardTimeout:
        return ToolResult(late=True, seconds=time.perf_counter() - began)
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        return ToolResult(error=error, seconds=time.perf_counter() - began)
    return ToolResult(value, seconds=time.perf_counter() - began)


async def _await(function: Callable[[], Any], seconds: float) -> ToolResult:
    began = time.perf_counter()
    task = asyncio.ensure_future(function())
    await asyncio.wait({task}, timeout=seconds)
    passed = time.perf_counter() - began
    if not task.done():
        task.cancel()
        return ToolResult(late=True, seconds=passed)
    try:
        return ToolResult(task.result(), seconds=passed)
    except (Exception, asyncio.CancelledError) as error:
        return ToolResult(error=error, seconds=passed)
