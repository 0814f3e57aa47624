"""Load balancing: assigns waiting requests to servers. The time of an assignment is logarithmic in
the number of servers, for any number of waiting requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import count

from rloo.engines.vllm.server_state import ServerState

# The order of servers: idle servers first, then the servers with the most room.
_Key = tuple[bool, int]


class NoServers(OSError):
    """Raised if no server is left to sample with."""


class LoadBalancer:
    """Assigns servers to waiting requests in order of arrival. A request gets the least busy server
    as soon as this server has room or is idle. Assigned completions count as `busy` immediately. A
    server that loads weights gets no request."""

    def __init__(self, members: Sequence[ServerState]) -> None:
        self._members = members
        self._waiting: deque[tuple[int, asyncio.Future[ServerState]]] = deque()
        # A heap with the current key of every usable server. Other entries are outdated.
        self._free: list[tuple[_Key, int, ServerState]] = []
        self._number = count()
        self._renew()

    async def take(
        self, completions: int, *, again: bool = False, near: ServerState | None = None
    ) -> ServerState:
        """Wait for a server with room for `completions`; `near` is preferred if it has room now. A
        repeated request (`again`) is assigned before all others. When the completions are done or
        cancelled, call `remove_server`. Raises NoServers."""
        free = near is not None and near.is_usable and not self._waiting
        if near is not None and free and _has_room(near, completions):
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
                if not place.cancelled() and place.exception() is None:  # assigned just now
                    self.remove_server(place.result(), completions)
                raise
            if member.fault is None:
                return member
            again = True  # the server was lost just now
            self.remove_server(member, completions)

    def remove_server(self, member: ServerState, completions: int) -> None:
        """Subtract this number of completions, which are done or cancelled, from a server's
        load."""
        member.busy -= completions
        self.restore_server(member)

    def restore_server(self, member: ServerState) -> None:
        """Make a server that is less busy, was recovered, or has loaded weights available to
        requests."""
        self._offer(member)
        self.deal()

    def deal(self) -> None:
        """Assign servers to waiting requests. The requests fail if no server is left or can be
        recovered."""
        while self._waiting:
            completions, place = self._waiting[0]
            if not place.done():  # else it was cancelled
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

    def require_servers(self) -> None:
        """Raise NoServers if no server is left or can be recovered."""
        if (error := self._nobody()) is not None:
            raise error

    def _nobody(self) -> NoServers | None:
        for member in self._members:
            if member.fault is None or (member.recovery and not member.recovery.done()):
                return None
        faults = "; ".join(str(member.fault) for member in self._members)
        return NoServers(f"no vLLM server is left: {faults}")

    def _best(self) -> ServerState | None:
        """The least busy server; None if none is usable."""
        while self._free:
            key, _, member = self._free[0]
            if member.is_usable and key == _key(member):
                return member
            heappop(self._free)
        return None

    def _offer(self, member: ServerState) -> None:
        if len(self._free) > 4 * len(self._members):  # most entries are outdated
            self._renew()
        heappush(self._free, (_key(member), next(self._number), member))

    def _renew(self) -> None:
        live = [member for member in self._members if member.is_usable]
        self._free = [(_key(member), next(self._number), member) for member in live]
        heapify(self._free)


def _has_room(member: ServerState, completions: int) -> bool:
    return not member.busy or member.busy + completions <= member.room


def _key(member: ServerState) -> _Key:
    return member.busy > 0, member.busy - member.room
