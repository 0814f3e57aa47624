"""Process groups of torch.distributed: functions that create, test and destroy groups without
waiting for a hanging collective. Also the padding of an all-gather."""

from __future__ import annotations

import atexit
import ctypes
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
# The bytes of padding that a rank may receive in every exchange. They cost less than a collective.
FREE_PADDING = 1 << 12
# The seconds within which NCCL must abort a hanging collective at the end of the process.
PATIENCE = 3.0
# Collectives that were started and have not been waited for to their end, each with its group.
_STARTED: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Creates groups of all processes that compute on `device`. A collective times out after
    `limit`."""

    device: torch.device
    limit: timedelta

    @property
    def backend(self) -> str:
        """The name of the backend in torch."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    def make(self) -> Any:
        """Create a new group. A collective: all processes call it at the same point."""
        return self._tried(dist.new_group(backend=self.backend, timeout=self.limit))

    def make_first(self, store: dist.Store, rank: int, size: int) -> None:
        """Create the default group, in which this is process `rank` of `size`."""
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=size, timeout=self.limit
        )
        self._tried(None)

    def _tried(self, group: Any) -> Any:
        """Run the group's first collective and return the group. NCCL connects only in this
        collective, and without a timeout."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        return group


def in_thread(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, or raise its exception. `work` runs in a thread, since it may
    wait in code in which Python handles no signal. Raises RuntimeError if `work` takes longer than
    `seconds`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        raise RuntimeError(f"it took longer than {seconds:g} s") from error


def connect_alone(device: torch.device) -> None:
    """Create the default group of a single process, unless there is one."""
    if not dist.is_initialized():
        ProcessGroups(device, timedelta(minutes=30)).make_first(dist.HashStore(), 0, 1)
        atexit.register(destroy_groups)


@dataclass(frozen=True, slots=True, eq=False)
class ShardingGroups:
    """The processes among which weights are sharded. `mesh` has the dimension `dp_shard`, and
    before it `dp_replicate` if several groups of processes each have all shards (HSDP).
    `all_ranks` is a group of all processes."""

    mesh: DeviceMesh
    all_ranks: Any


def sharding_groups(
    device: torch.device, timeout: float, dp_shard_size: int | None = None
) -> ShardingGroups:
    """Create the groups of sharded weights: groups of `dp_shard_size` neighbours (None: all
    processes) among which weights are sharded, and groups of processes that have the same shard.
    The groups are separate ones, since collectives in other groups may be abandoned. A collective:
    all processes call it at the same point."""
    from torch.distributed.device_mesh import DeviceMesh

    everyone = dist.new_group(timeout=timedelta(seconds=timeout))
    size = dist.get_world_size()
    if dp_shard_size in (None, size):
        mesh = DeviceMesh.from_group(everyone, device.type, mesh_dim_names=("dp_shard",))
        return ShardingGroups(mesh, everyone)
    places = torch.arange(size).view(-1, dp_shard_size)
    shards, replicas = _row_and_column(dist.get_rank(), places, timeout)
    names = ("dp_replicate", "dp_shard")
    mesh = DeviceMesh.from_group([replicas, shards], device.type, places, mesh_dim_names=names)
    return ShardingGroups(mesh, everyone)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroup:
    """Process `rank` of `size` processes that compute the same packed rows together."""

    rank: int
    size: int
    group: Any

    def all_to_all(self, blocks: Tensor) -> Tensor:
        """Send block j of (size, ...) to rank j. Returns one block of each rank."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of every rank of the group, (size, ...)."""
        return _all_gather(values, self.size, self.group)


def sequence_group(rank: int, size: int, sp_size: int, timeout: float) -> SequenceGroup:
    """Divide `size` processes into groups of `sp_size` neighbours, and return the group of `rank`.
    A collective: all processes call it at the same point."""
    slices = torch.arange(size).view(-1, sp_size)
    return SequenceGroup(rank % sp_size, sp_size, _row(rank, slices, timeout))


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """Process `rank` of `size` processes that compute the same rows together, each with a shard of
    every sharded matrix (tensor parallelism). `replicas` are the processes that have the same
    shards."""

    rank: int
    size: int
    group: Any
    replicas: Any

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the values of every rank of the group."""
        summed = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    def all_gather(self, values: Tensor) -> Tensor:
        """The values of every rank of the group, (size, ...)."""
        return _all_gather(values, self.size, self.group)


def tensor_group(rank: int, size: int, tp_size: int, timeout: float) -> TensorGroup:
    """Divide `size` processes into groups of `tp_size` neighbours, and return the group of `rank`.
    A collective: all processes call it at the same point."""
    mine = _row_and_column(rank, torch.arange(size).view(-1, tp_size), timeout)
    return TensorGroup(rank % tp_size, tp_size, *mine)


def _all_gather(values: Tensor, size: int, group: Any) -> Tensor:
    found = values.new_empty(size, *values.shape)
    dist.all_gather(list(found), values, group=group)
    return found


def _row_and_column(rank: int, places: Tensor, timeout: float) -> tuple[Any, Any]:
    """The groups of the ranks in the row and in the column of `rank` in the matrix `places`. A
    collective: all processes call it at the same point."""
    return _row(rank, places, timeout), _row(rank, places.T, timeout)


def _row(rank: int, places: Tensor, timeout: float) -> Any:
    """The group of the ranks in the row of `rank`. See `_row_and_column`."""
    rows, limit = places.tolist(), timedelta(seconds=timeout)
    groups = [dist.new_group(ranks, timeout=limit) for ranks in rows]
    return groups[next(n for n, ranks in enumerate(rows) if rank in ranks)]


def add_started(work: Any, group: Any) -> None:
    """Record that a collective in a group (None: the default group) was started."""
    _STARTED[work] = group or dist.group.WORLD


def remove_started(work: Any) -> None:
    """Record that a collective has ended."""
    _STARTED.pop(work, None)


def destroy_groups() -> None:
    """Destroy all process groups, once. A group with a pending collective is not destroyed, since
    destroying it would block."""
    if not dist.is_initialized():
        return
    broken = [group for work, group in _STARTED.items() if not work.is_completed()]
    if not broken:
        dist.destroy_process_group()
    for group in broken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        with suppress(RuntimeError):  # the group has no NCCL, or the abort hangs
            in_thread(group._get_backend(torch.device("cuda")).abort, PATIENCE)


def common_length(lengths: Sequence[int]) -> int:
    """The number of bytes that all ranks exchange in one all-gather, if the ranks' parts have these
    lengths. Shorter parts are padded; the rest of a longer part is broadcast. A larger number needs
    fewer broadcasts. The result is the largest length with which no rank receives more than a tenth
    of its bytes as padding, or `FREE_PADDING` if that is more."""
    total = sum(lengths)

    def is_too_long(common: int) -> bool:
        padding = [max(0, common - length) for length in lengths]
        added = sum(padding)
        return any(
            added - own > max((total - length) / 10, FREE_PADDING)
            for own, length in zip(padding, lengths, strict=True)
        )

    ordered = sorted(lengths)
    return ordered[bisect_left(ordered, True, key=is_too_long) - 1]
