"""A thread with an event loop that runs coroutine functions concurrently, under one deadline."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent import futures
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_RESPONSE_SECONDS = 1.0
_TURN_SECONDS = 0.2


class LoopThread:
    """An event loop in a separate thread, reused between calls.

    The thread is separate because the caller may already run a loop (in a notebook). The loop is
    reused because the clients of a coroutine function are bound to the loop of their first use.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def run(
        self,
        calls: Mapping[str, Callable[[], Coroutine[Any, Any, Any]]],
        seconds: float | None,
        context: Callable[[str], AbstractContextManager[None]],
        until: str = futures.ALL_COMPLETED,
    ) -> tuple[dict[str, futures.Future[Any]], list[str]]:
        """Run coroutine functions, each within `context(name)`, until all are done or `seconds`
        have passed. If `until` is FIRST_EXCEPTION, the first failure also ends the wait. Unfinished
        functions are cancelled.

        Returns the finished futures, and the names of the unfinished functions. If a coroutine
        blocks the loop, its name comes first.
        """
        over = threading.Event()
        running = {
            name: asyncio.run_coroutine_threadsafe(_within(context, name, call, over), self._loop)
            for name, call in calls.items()
        }
        try:
            _wait(running.values(), seconds, until)
            done = {name: future for name, future in running.items() if future.done()}
            task = asyncio.current_task(self._loop)
            blocking = task.get_name() if task is not None else None
            late = [name for name in calls if name not in done]
            return done, sorted(late, key=lambda name: name != blocking)
        finally:
            over.set()
            for future in running.values():
                future.cancel()  # after Ctrl-C nothing may continue in the background

    def submit(self, call: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Start a coroutine and return its future."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def responds(self) -> bool:
        """Return whether the loop runs a callback within a short time. If not, a cancelled
        coroutine still blocks the loop."""
        free = threading.Event()
        self._loop.call_soon_threadsafe(free.set)
        return free.wait(_RESPONSE_SECONDS)

    def close(self) -> None:
        """Stop the loop. A coroutine that blocks the loop remains in the thread, a daemon
        thread."""
        if not self._closed:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_RESPONSE_SECONDS)

    def _run(self) -> None:
        while not self._closed:
            try:
                self._loop.run_forever()
            except BaseException:  # SystemExit of a task, which asyncio also raises here
                continue
        cancelled = asyncio.all_tasks(self._loop)
        for task in cancelled:
            task.cancel()  # tasks of a call that was just cancelled
        if cancelled:
            self._loop.run_until_complete(asyncio.wait(cancelled, timeout=_RESPONSE_SECONDS))
        self._loop.close()


def _wait(running: Collection[futures.Future[Any]], seconds: float | None, until: str) -> None:
    end = time.monotonic() + (seconds or math.inf)
    while (left := end - time.monotonic()) > 0:
        # Wait in short intervals. After each, Python handles signals that another thread received.
        done, pending = futures.wait(running, min(left, _TURN_SECONDS), until)
        failed = any(future.cancelled() or future.exception() for future in done)
        if not pending or (failed and until == futures.FIRST_EXCEPTION):
            return


async def _within(
    context: Callable[[str], AbstractContextManager[None]],
    name: str,
    call: Callable[[], Coroutine[Any, Any, Any]],
    over: threading.Event,
) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.set_name(name)
    with context(name):
        try:
            return await call()
        except (asyncio.CancelledError, GeneratorExit) as error:
            if not over.is_set():  # the function raised it, or awaited a cancelled task
                raise
            ended = error
    raise ended


def is_coroutine(function: Any) -> bool:
    """Return whether `function` returns a coroutine when it is called: whether it is a coroutine
    function, an object with an async `__call__`, or `functools.partial` of either."""
    while isinstance(function, partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004 (an object with an async call)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
