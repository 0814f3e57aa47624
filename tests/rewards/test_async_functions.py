"""A thread with an event loop."""

from __future__ import annotations

import asyncio

import anyio

from rloo.rewards.async_functions import cancel_tasks


def test_the_task_of_a_task_group_is_cancelled_by_its_group():
    ends: list[str] = []

    async def connect() -> None:
        await asyncio.sleep(10)

    async def call() -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(connect)  # as httpx does
                await asyncio.sleep(10)
        finally:
            ends.append("call")

    async def close() -> list[asyncio.Task[object]]:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)  # `call` begins, and `connect` has not begun
        await cancel_tasks()
        assert task.cancelled()
        return [other for other in asyncio.all_tasks() if other != asyncio.current_task()]

    assert asyncio.run(close()) == []
    assert ends == ["call"]


def test_a_task_that_does_not_end_is_not_awaited_for_longer_than_the_limit():
    over = asyncio.Event()

    async def stubborn() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async def close() -> bool:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await cancel_tasks(0.05)
        ended = task.done()
        over.set()
        await task
        return ended

    assert not asyncio.run(close())
