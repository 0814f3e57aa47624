"""Groups of processes of torch.distributed: made, tried, and left."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# Seconds that the main process waits at its end for others to leave.
PATIENCE = 3.0
# What was waited for in vain and may still be under way, with its group.
ABANDONED: list[tuple[Any, Any]] = []


def connect_alone(*, on_gpu: bool) -> None:
    """A group of this process alone, for what needs one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(leave)


def lines_of(device: torch.device, timeout: float) -> DeviceMesh:
    """See `World.mesh`. A group of its own: a wait in another one may be given up."""
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group(timeout=timedelta(seconds=timeout))
    return DeviceMesh.from_group(group, device.type)


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


def tried(group: Any, device: torch.device) -> Any:
    """The group, after its first exchange: NCCL connects only then, and waits without an end."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
    return group


def leave() -> None:
    """Leave all groups, unless that is done. One with an exchange under way would wait for its end;
    it is never let go."""
    if not dist.is_initialized():
        return
    broken = [group for work, group in ABANDONED if not work.is_completed()]
    if not broken:
        dist.destroy_process_group()
    for group in broken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        with suppress(RuntimeError):  # there is no NCCL in it, or it does not end
            in_thread(group._get_backend(torch.device("cuda")).abort, PATIENCE)
