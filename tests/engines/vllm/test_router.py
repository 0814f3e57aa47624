"""Who gets which server next, and at what cost."""

import asyncio

import pytest

from rloo.engines.vllm import router as module
from rloo.engines.vllm.router import LoadBalancer, NoServers
from rloo.engines.vllm.server_state import ServerState


def make_members(*rooms: int) -> list[ServerState]:
    return [ServerState(None, room=room) for room in rooms]


async def started(*coroutines):
    tasks = [asyncio.create_task(each) for each in coroutines]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_the_one_with_the_least_to_do_is_given_and_nobody_overtakes():
    async def run():
        members = make_members(8, 8)
        places = LoadBalancer(members)
        given = [await places.take(4) for _ in range(4)]
        assert sorted(map(id, given)) == sorted(map(id, [*members, *members]))
        waiting = await started(places.take(4), places.take(4))
        assert not any(task.done() for task in waiting)
        places.remove_server(given[2], 4)
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, False]
        assert waiting[0].result() is given[2] and given[2].busy == 8
        again = await started(places.take(4, again=True))
        places.remove_server(given[0], 4)
        await asyncio.sleep(0)
        assert again[0].done() and not waiting[1].done()
        waiting[1].cancel()

    asyncio.run(run())


def test_who_is_near_is_given_while_it_is_well_has_room_and_nobody_waits():
    async def run():
        members = near, other = make_members(8, 8)
        places = LoadBalancer(members)
        assert [await places.take(4, near=near) for _ in range(2)] == [near, near]
        assert await places.take(4, near=near) is other
        assert (near.busy, other.busy) == (8, 4)
        places.remove_server(near, 4)
        near.fault = "gone"
        assert await places.take(4, near=near) is other
        near.fault = None
        near.loads = other.loads = True
        (waiting,) = await started(places.take(4, near=near))
        assert not waiting.done()
        near.loads = False
        places.restore_server(near)
        await asyncio.sleep(0)
        assert waiting.result() is near

    asyncio.run(run())


def test_a_group_larger_than_any_room_goes_to_a_server_with_nothing_to_do():
    async def run():
        small, large = make_members(2, 6)
        places = LoadBalancer([small, large])
        first = await places.take(4)
        second = await places.take(4)
        assert {id(first), id(second)} == {id(small), id(large)}

    asyncio.run(run())


def test_what_is_given_in_the_moment_of_a_cancellation_is_given_back():
    async def run():
        (member,) = make_members(4)
        places = LoadBalancer([member])
        await places.take(4)
        (task,) = await started(places.take(4))
        places.remove_server(member, 4)  # given to the task, which does not know it yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert member.busy == 0

    asyncio.run(run())


def test_a_server_that_is_lost_in_the_moment_it_is_given_is_not_asked():
    async def run():
        first, second = make_members(8, 4)
        places = LoadBalancer([first, second])
        (task,) = [asyncio.create_task(places.take(4))]
        first.loads = second.loads = True
        await asyncio.sleep(0)
        for member in (first, second):
            member.loads = False
            places.restore_server(member)
        assert first.busy == 4
        first.fault = "gone"
        assert await task is second and first.busy == 0

    asyncio.run(run())


def test_nobody_waits_for_servers_that_do_not_come_back():
    async def run():
        (member,) = make_members(4)
        member.fault = "gone"
        places = LoadBalancer([member])
        with pytest.raises(NoServers, match="no vLLM server is left: gone"):
            await places.take(1)
        member.recovery = asyncio.create_task(asyncio.sleep(0.01))
        member.recovery.add_done_callback(lambda _: places.deal())
        with pytest.raises(NoServers):
            await places.take(1)
        with pytest.raises(NoServers):
            places.require_servers()

    asyncio.run(run())


def steps_of(monkeypatch, servers: int, groups: int) -> float:
    """How often a server is looked at for each of the groups, all of which wait at once."""
    looks = 0
    key = module._key

    def counted(member):
        nonlocal looks
        looks += 1
        return key(member)

    async def run():
        members = make_members(*[8] * servers)
        places = LoadBalancer(members)

        async def one():
            member = await places.take(4)
            await asyncio.sleep(0)
            places.remove_server(member, 4)

        monkeypatch.setattr(module, "_key", counted)
        await asyncio.gather(*[one() for _ in range(groups)])
        monkeypatch.setattr(module, "_key", key)
        assert all(member.busy == 0 for member in members)
        assert len(places._free) <= 4 * servers + 1

    asyncio.run(run())
    return looks / groups


def test_a_group_costs_as_much_with_many_servers_and_many_that_wait(monkeypatch):
    few = steps_of(monkeypatch, servers=4, groups=100)
    assert steps_of(monkeypatch, servers=4, groups=2000) < 1.5 * few
    assert steps_of(monkeypatch, servers=200, groups=2000) < 1.5 * few
