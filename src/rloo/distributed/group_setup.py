"""Groups of torch.distributed: made, tried, and left without waiting for what hangs in them; and
what is sent in them at once."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
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
# Elements of the gradients that are sent at once.
BUCKET = 1 << 24
# Seconds in which NCCL is to give up what hangs, at the end of the process.
PATIENCE = 3.0
# What was waited for in vain and may still be under way, with its group.
_ABANDONED: list[tuple[Any, Any]] = []


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Groups of all processes that compute on `device`. An exchange ends after `limit`."""

    device: torch.device
    limit: timedelta

    @property
    def backend(self) -> str:
        """What torch calls it."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    def make(self) -> Any:
        """Another group; all processes make it at the same point."""
        return self._tried(dist.new_group(backend=self.backend, timeout=self.limit))

    def make_first(self, store: dist.Store, rank: int, size: int) -> None:
        """The default group, in which this is process `rank` of `size`."""
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=size, timeout=self.limit
        )
        self._tried(None)

    def _tried(self, group: Any) -> Any:
        """The group, after its first exchange: NCCL connects only then, and waits without end."""
        if self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            torch.cuda.synchronize(self.device)
        return group


def in_thread(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns or raises, which waits where Python handles no signal. Raises
    RuntimeError if that takes longer than `seconds`."""
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
    """A group of this process alone, for what needs one."""
    if not dist.is_initialized():
        ProcessGroups(device, timedelta(minutes=30)).make_first(dist.HashStore(), 0, 1)
        atexit.register(destroy_groups)


def device_groups(device: torch.device, timeout: float) -> DeviceMesh:
    """See `World.mesh`. A group of its own: a wait in another one may be given up."""
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group(timeout=timedelta(seconds=timeout))
    return DeviceMesh.from_group(group, device.type)


def abandon(work: Any, group: Any) -> None:
    """Note that an exchange in a group, None for the default one, was given up."""
    _ABANDONED.append((work, group or dist.group.WORLD))


def destroy_groups() -> None:
    """Leave all groups, unless another trainer of this process has. One with an exchange under way
    would wait for its end; it is never let go."""
    if not dist.is_initialized():
        return
    broken = [group for work, group in _ABANDONED if not work.is_completed()]
    if not broken:
        dist.destroy_process_group()
    for group in broken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        with suppress(RuntimeError):  # there is no NCCL in it, or it does not end
            in_thread(group._get_backend(torch.device("cuda")).abort, PATIENCE)


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one dtype and device, of at most `BUCKET` elements together or alone."""
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        size += parameter.numel()
        kind = parameter.dtype, parameter.device
        alike = bucket and (bucket[0].dtype, bucket[0].device) == kind
        if bucket and (not alike or size > BUCKET):
            yield bucket
            bucket, size = [], parameter.numel()
        bucket.append(parameter)
    if bucket:
        yield bucket
