"""vLLM's weight transfer over NCCL, which loads a version faster than reading its files does. The
transfer sends the tensors in the version's folder, so that no tensor is gathered twice. All servers
receive one broadcast. If the transfer fails, the servers read the folder.

vLLM's sender is used unmodified (vllm.distributed.weight_transfer of 0.26 to 0.32). The sender
needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from rloo.engines.vllm.client import ServerError, VLLMClient
from rloo.engines.vllm.server_process import free_port
from rloo.engines.vllm.server_state import ServerState, ServerWeights

TRANSFER_ROUTE = "/init_weight_transfer_engine"
# The time limit of the first transfer of a group, which also connects trainer and servers. The
# limit is short, so that a missing network connection is detected early.
FIRST_SECONDS = 120.0
# Seconds that a server waits for the other servers of its group, before all read the folder.
READY_SECONDS = 1.0
# Seconds between two tests for lost servers during a transfer.
LOST_EVERY = 0.5
_PHASE = "sending weights over NCCL"
# safetensors' names of dtypes.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def unavailable_reason(device: torch.device) -> str | None:
    """Why this process cannot send over NCCL, or None if it can."""
    if device.type != "cuda":
        return "the trainer has no GPU"
    found = find_spec("vllm")
    if found is None or found.origin is None:  # a folder named vllm is not the package
        return "vLLM is not installed beside the trainer, which needs it to send"
    return None


@dataclass(slots=True, eq=False)
class _Meeting:
    """The servers that are ready to receive a version. `received` gets those that have received
    it."""

    weights: ServerWeights
    received: asyncio.Future[list[ServerState]]
    ready: list[ServerState]


class NCCLGroup:
    """A process group of the trainer (rank 0) and the workers of all `members` that can receive. A
    version is broadcast once, to all servers without a fault. A server that is ready waits at most
    `READY_SECONDS` for the others. If they are not ready by then, all servers read the folder of
    this version. If servers were lost or have returned, the next version makes a new group. After a
    failure, no version is sent over NCCL. All methods run in one event loop, except `_send`."""

    def __init__(
        self,
        members: Sequence[ServerState],
        device: torch.device,
        seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._members, self._device, self._seconds, self._say = members, device, seconds, say
        self._meeting: _Meeting | None = None
        self._failed = False
        # vLLM's sender, and the servers of its process group. A server that was lost since then has
        # a greater number of losses.
        self._sender: Any = None
        self._calls: _Calls | None = None
        self._group: list[tuple[str, int]] = []
        self._weights: ServerWeights | None = None

    async def sent(self, member: ServerState, weights: ServerWeights) -> bool:
        """Receive a version in a paused server, together with the other servers. Return False if
        the server must read the folder."""
        if self._failed or not _takes_part(member):
            return False
        meeting = self._meeting
        if meeting is None or meeting.weights.version < weights.version:
            received = asyncio.get_running_loop().create_future()
            meeting = self._meeting = _Meeting(weights, received, [member])
            await self._hold(meeting)
        elif meeting.weights is not weights:
            return False  # the other servers load a newer version
        else:
            meeting.ready.append(member)
        return member in await asyncio.shield(meeting.received)  # `_hold` has deadlines

    async def _hold(self, meeting: _Meeting) -> None:
        received: list[ServerState] = []
        try:
            if await self._all_ready(meeting):
                received = await self._transferred(meeting)
        finally:
            meeting.received.set_result(received)

    async def _all_ready(self, meeting: _Meeting) -> bool:
        """Wait for the servers that have not loaded the version, for a short time. Return whether
        all are ready."""
        label, end = meeting.weights.label, time.monotonic() + READY_SECONDS
        while any(
            _takes_part(member) and member.label != label and member not in meeting.ready
            for member in self._members
        ):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
        return True

    async def _transferred(self, meeting: _Meeting) -> list[ServerState]:
        """Send the version. Return the servers that have received it: all or none."""
        # In the order of `members`, not that in which they were ready: a group has one order.
        servers = [m for m in self._members if m in meeting.ready and _takes_part(m)]
        if not servers:  # lost meanwhile
            return []
        group = [(member.url, member.losses) for member in servers]
        connects = group != self._group
        limit = min(self._seconds, FIRST_SECONDS) if connects else self._seconds
        try:
            async with asyncio.timeout(limit):
                await self._send_in_thread(meeting.weights, servers, group)
        except Exception as error:  # any error of vLLM's sender
            self._failed = True
            fact = str(error) or type(error).__name__
            urls = ", ".join(member.url for member in self._members if member.receives)
            self._say(f"weights go to {urls} by files from now on, not over NCCL: {fact}")
            return []
        return servers

    async def _send_in_thread(
        self, weights: ServerWeights, servers: list[ServerState], group: list[tuple[str, int]]
    ) -> None:
        """Send a version. A call inside NCCL cannot be interrupted, so this method makes the call
        in a separate thread. The thread is abandoned at the deadline, after a server has failed a
        call, and after a server is lost."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def tell_from_thread(error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(tell, error)

        calls = _Calls([m.client for m in servers], loop, self._seconds, tell_from_thread)

        def work() -> None:
            try:
                self._send(weights, calls, group)
            except Exception as error:
                tell_from_thread(error)
            else:
                tell_from_thread(None)

        threading.Thread(target=work, daemon=True).start()
        try:
            while not done.done():
                await asyncio.wait([done], timeout=LOST_EVERY)
                if lost := [member.fault for member in servers if member.fault is not None]:
                    tell(RuntimeError(lost[0]))
            await done
        finally:
            done.cancel()  # a later error of the thread has no effect

    def _send(self, weights: ServerWeights, calls: _Calls, group: list[tuple[str, int]]) -> None:
        self._weights = weights
        if group == self._group:
            assert self._calls is not None
            self._calls.tell = calls.tell
        else:
            if self._sender is not None:
                self._sender.shutdown()
                stay = [(url, n) in self._group for url, n in group]
                calls.release([c for c, s in zip(calls.clients, stay, strict=True) if s])
            self._sender, self._calls = self._connected(calls), calls
            self._group = group
        self._sender.send_weights()

    def _connected(self, calls: _Calls) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        group = self

        class Source(WeightSource):
            """The tensors of the current version, in an order that does not change."""

            def metadata(self) -> list[Any]:
                assert group._weights is not None
                return [ParamMeta(*each) for each in described(group._weights)]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                assert group._weights is not None
                return tensors(group._weights, group._device)

        hosts = [urlsplit(client.url).hostname or "" for client in calls.clients]
        how = NCCLTrainerInitInfo(
            master_address=shared_address([_address_towards(host) for host in hosts]),
            master_port=free_port(),
            world_size=1 + sum(calls.find_sizes()),
            rank=0,
        )
        return WeightTransferTrainerFactory.trainer_init(how, client=calls, source=Source())


def _takes_part(member: ServerState) -> bool:
    return member.receives and member.fault is None


class _Calls:
    """The client that vLLM's sender calls from other threads. It calls all servers at the same
    time, in the event loop. `tell` gets the first error of a call at once, since the sender itself
    may wait inside NCCL for a server that has failed."""

    def __init__(
        self,
        clients: list[VLLMClient],
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        tell: Callable[[BaseException | None], None],
    ) -> None:
        self.clients, self._loop, self._seconds, self.tell = clients, loop, seconds, tell
        self._sizes: list[int] = []

    def find_sizes(self) -> list[int]:
        """The number of workers of each server."""
        route, seconds = "/get_world_size", self._seconds
        found = self._wait([c.get(route, phase=_PHASE, seconds=seconds) for c in self.clients])
        self._sizes = [int(each["world_size"]) for each in found]
        return self._sizes

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # The sender's offset is that of the first server, whose workers have the ranks from 1 on.
        offsets = accumulate(self._sizes[:-1], initial=int(init_info["rank_offset"]))
        infos = [{"init_info": {**init_info, "rank_offset": offset}} for offset in offsets]
        self._post(TRANSFER_ROUTE, infos)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", [{"update_info": update_info}] * len(self.clients))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", [body] * len(self.clients))

    def release(self, clients: list[VLLMClient]) -> None:
        """Make servers free the memory of their process group. An error has no other effect."""
        route, seconds = "/shutdown_weight_transfer_engine", self._seconds
        with suppress(ServerError):
            self._run([client.post(route, phase=_PHASE, seconds=seconds) for client in clients])

    def _post(self, path: str, bodies: Sequence[dict[str, Any] | None] | None = None) -> None:
        pairs = zip(self.clients, bodies or [None] * len(self.clients), strict=True)
        seconds = self._seconds
        self._wait([c.post(path, body, phase=_PHASE, seconds=seconds) for c, body in pairs])

    def _wait(self, asked: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        try:
            return self._run(asked)
        except Exception as error:
            self.tell(error)
            raise

    def _run(self, asked: list[Coroutine[Any, Any, Any]]) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*asked)

        # The calls have earlier deadlines. This limit is for an event loop that has stopped.
        answer = asyncio.run_coroutine_threadsafe(together(), self._loop)
        return answer.result(self._seconds + 10.0)


async def fill(
    member: ServerState,
    weights: ServerWeights,
    seconds: float,
    say: Callable[[str], None],
    group: NCCLGroup | None,
) -> None:
    """Load a version into a server: over NCCL in its `group` if possible, otherwise from the
    folder. A server that refuses a delta, for example for its digest, loads the complete
    weights."""
    if group is not None and await group.sent(member, weights):
        return
    if member.extended:
        try:
            await member.client.load_version(str(weights.folder), seconds=seconds)
            return
        except ServerError as error:
            if weights.repair is None or error.status is None:
                raise
            say(f"{error}; it loads the complete weights")
    folder = weights.folder
    if weights.repair is not None:  # the version is a delta
        try:
            folder = await asyncio.to_thread(weights.repair)
        except (OSError, ValueError) as error:
            raise ServerError("loading weights", member.url, f"has no folder: {error}") from error
    await member.client.reload(str(folder), seconds=seconds)


def described(weights: ServerWeights) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Yield name, dtype and shape of every tensor of a version, in the order of `tensors`."""
    if weights.tensors is not None:
        for name, tensor in weights.tensors(torch.device("meta")):
            yield name, tensor.dtype, tuple(tensor.shape)
        return
    for name, file in _places(weights.folder):
        with safe_open(weights.folder / file, "pt") as opened:
            part = opened.get_slice(name)
            yield name, _DTYPES[part.get_dtype()], tuple(part.get_shape())


def tensors(weights: ServerWeights, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a version on `device`, one at a time: from host memory if the version
    is there, otherwise from its folder, in the order of its index."""
    if weights.tensors is not None:
        yield from weights.tensors(device)
        return
    for name, file in _places(weights.folder):
        with safe_open(weights.folder / file, "pt") as opened:
            yield name, opened.get_tensor(name).to(device)


def _places(folder: Path) -> list[tuple[str, str]]:
    index = json.loads((folder / SAFE_WEIGHTS_INDEX_NAME).read_text())
    return list(index["weight_map"].items())


def shared_address(found: Sequence[str]) -> str:
    """The address at which all servers can reach this machine, from those at which each can. If one
    of them is another machine, this is not the address of the loopback interface."""
    return next((each for each in found if not ip_address(each).is_loopback), found[0])


def _address_towards(host: str) -> str:
    """The address of this machine at which `host` can reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((host, 9))  # sends no data
        return str(asked.getsockname()[0])
