"""Who waits for a server, and which one is next. A step of it takes as long as the logarithm of the
number of servers, however many wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from rloo.engines.vllm.server_state import ServerState

# Servers are compared by it: one that has nothing to do comes first, then who has the most room.
_Key = tuple[bool, int]


class NoServers(OSError):
    """No server is left to sample with."""


class LoadBalancer:
    """Gives servers to those who wait, in the order in which they came: the one with the least to
    do, once it has room, or has nothing to do. What is given counts as `busy` at once. While
    `holding` nothing is given."""

    def __init__(self, members: Sequence[ServerState]) -> None:
        self.holding = False
        self._members = members
        self._waiting: deque[tuple[int, asyncio.Future[ServerState]]] = deque()
        # Every server without a fault, by its key as it is now, among entries that are outdated.
        self._free: list[tuple[_Key, int, ServerState]] = []
        self._number = count()
        self._renew()

    async def take(
        self, completions: int, *, again: bool = False, near: ServerState | None = None
    ) -> ServerState:
        """A server for so many completions, `near` if it has room now; what is asked for `again`
        comes first. `remove_server` it then. Raises NoServers."""
        free = not self.holding and not self._waiting
        if near is not None and free and near.fault is None and _has_room(near, completions):
            near.busy += completions
            self._offer(near)
            return near
        while True:
            place: asyncio.Future[ServerState] = asyncio.get_running_loop().create_future()
            (self._waiting.appendleft if again else self._waiting.append)((completions, place))
            self.deal()
            try:
                member = await place
            except asyncio.CancelledError:
                if not place.cancelled() and place.exception() is None:  # given in this moment
                    self.remove_server(place.result(), completions)
                raise
            if member.fault is None:
                return member
            again = True  # it was lost in this moment
            self.remove_server(member, completions)

    def remove_server(self, member: ServerState, completions: int) -> None:
        """So many completions of a server are done, or given up."""
        member.busy -= completions
        self.restore_server(member)

    def restore_server(self, member: ServerState) -> None:
        """A server has less to do than before, or has come back."""
        self._offer(member)
        self.deal()

    def release(self) -> None:
        """Hold no longer. The servers may have another room than before."""
        self.holding = False
        self._renew()
        self.deal()

    def deal(self) -> None:
        """Give what can be given; where no server is left and none may come back, an error."""
        while self._waiting and not self.holding:
            completions, place = self._waiting[0]
            if not place.done():  # else it was given up
                member = self._best()
                if member is None or not _has_room(member, completions):
                    break
                member.busy += completions
                self._offer(member)
                place.set_result(member)
            self._waiting.popleft()
        if self._waiting and self._best() is None and (error := self._nobody()) is not None:
            while self._waiting:
                _, place = self._waiting.popleft()
                if not place.done():
                    place.set_exception(error)

    async def somebody(self) -> None:
        """Wait until a server is in. Raises NoServers."""
        while all(member.fault is not None for member in self._members):
            if (error := self._nobody()) is not None:
                raise error
            coming = [m.recovery for m in self._members if m.recovery and not m.recovery.done()]
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)

    def _nobody(self) -> NoServers | None:
        for member in self._members:
            if member.fault is None or (member.recovery and not member.recovery.done()):
                return None
        faults = "; ".join(str(member.fault) for member in self._members)
        return NoServers(f"no vLLM server is left: {faults}")

    def _best(self) -> ServerState | None:
        """The server with the least to do, None where all have a fault."""
        while self._free:
            key, _, member = self._free[0]
            if member.fault is None and key == _key(member):
                return member
            heappop(self._free)
        return None

    def _offer(self, member: ServerState) -> None:
        if len(self._free) > 4 * len(self._members):  # most are outdated
            self._renew()
        heappush(self._free, (_key(member), next(self._number), member))

    def _renew(self) -> None:
        live = [member for member in self._members if member.fault is None]
        self._free = [(_key(member), next(self._number), member) for member in live]
        heapify(self._free)


def _has_room(member: ServerState, completions: int) -> bool:
    return not member.busy or member.busy + completions <= member.room


def _key(member: ServerState) -> _Key:
    return member.busy > 0, member.busy - member.room
