"""The state of a server, and the tasks of its event loop."""

from __future__ import annotations

import asyncio

import anyio

from rloo.engines.vllm.server_state import cancel_others


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

    async def close() -> set[asyncio.Task[object]]:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)  # `call` begins, and `connect` has not begun
        await cancel_others()
        assert task.cancelled()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(close()) == set()
    assert ends == ["call"]
