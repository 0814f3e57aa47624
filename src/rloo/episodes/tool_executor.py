"""Calls user functions, each with a time limit. Plain functions of a call run one after another,
coroutine functions run concurrently. Several threads may call functions at the same time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rloo.rewards.async_functions import LoopThread, is_coroutine
from rloo.rewards.timeout import RewardTimeout, call_in_a_thread, call_with_timeout

# Seconds after the deadline in which the event loop must report a late coroutine.
_TELLS = 1.0


class EpisodeLost(Exception):
    """Raised by a tool if its episode cannot continue for a reason that the model did not cause."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of a call: its value, or the error that it raised. A `late` call has neither."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False
    seconds: float = 0.0


# A function without arguments, and its time limit in seconds.
Asked = tuple[Callable[[], Any], float]


class ToolExecutor:
    """Calls functions. Coroutine functions run in one event loop. All executors share this loop,
    and it stays open between calls, so that tools can use a connection that `reset` has opened."""

    _shared: ClassVar[LoopThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def call(self, asked: Sequence[Asked]) -> list[ToolResult]:
        """The results of the calls: first the plain functions run, in order, then the coroutine
        functions, concurrently."""
        waits = [is_coroutine(function) for function, _ in asked]
        found = {n: _call(*call) for n, call in enumerate(asked) if not waits[n]}
        found |= self._call_together({n: call for n, call in enumerate(asked) if waits[n]})
        return [outcome for _, outcome in sorted(found.items())]

    def _call_together(self, asked: dict[int, Asked]) -> dict[int, ToolResult]:
        if not asked:
            return {}
        with ToolExecutor._lock:
            loop = ToolExecutor._shared = ToolExecutor._shared or LoopThread()
        calls = {str(number): partial(_await, *call) for number, call in asked.items()}
        longest = max(seconds for _, seconds in asked.values())
        done, late = loop.run(calls, longest + _TELLS, lambda _: nullcontext())
        if late and not loop.responds():  # a coroutine blocks the loop
            loop.close()
            with ToolExecutor._lock:
                if ToolExecutor._shared is loop:
                    ToolExecutor._shared = None
        found = {int(name): future.result() for name, future in done.items()}
        return found | {int(name): ToolResult(late=True, seconds=longest) for name in late}


def _call(function: Callable[[], Any], seconds: float) -> ToolResult:
    began = time.perf_counter()
    # The timer that ends a process whose main thread hangs exists once: it is the main thread's.
    in_main_thread = threading.current_thread() is threading.main_thread()
    call = call_with_timeout if in_main_thread else call_in_a_thread
    try:
        value = call(seconds, function)
    except RewardTimeout:
        return ToolResult(late=True, seconds=time.perf_counter() - began)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
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
