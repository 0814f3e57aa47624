"""A GPU that is pretended on a CPU: "cuda:0" for a whole real run.

`pretended()` marks storages of the CPU as the device's. Inside, `.device` says `cuda:0`; what mixes
devices raises, as does what the real operators refuse, what a capture forbids, and a capture into a
pool whose graphs are gone; host waits and launches are counted by phase. Nothing is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.autograd.graph
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_map

from rloo.model import flash_gpu
from support.gpu.device import GIB, WHERE, Device
from support.gpu.kernels import Kernels
from support.gpu.modes import Operations, Places
from support.gpu.runtime import Runtime

__all__ = ["GIB", "Device", "pretended"]


@contextmanager
def pretended(
    total: int = 80 * GIB, version: tuple[int, int] | None = None, *, exact: bool = False
) -> Iterator[Device]:
    """A GPU of `total` bytes inside of the block, by the rules of torch `version`, by default of
    the one that runs. `exact`: its attention takes float64, which no real one does, so that what is
    computed by it can be compared to the last digits."""
    with suppress(ImportError):  # inside, it would look for the libraries of a GPU
        import bitsandbytes  # noqa: F401
    major, minor = torch.__version__.split(".")[:2]
    device = Device(total, version or (int(major), int(minor)), exact)
    operations = Operations(device)
    places, kernels = Places(device, operations), Kernels(device)
    device.kernels = kernels
    kernels.install()
    with ExitStack() as stack:
        stack.callback(kernels.remove)
        if exact:
            precise = {torch.float64: 1e-4}  # of a definition in float32
            stack.enter_context(patch.dict(flash_gpu._ROUNDING, precise))
            kinds = (*flash_gpu.HALF, torch.float64)
            stack.enter_context(patch.object(flash_gpu, "HALF", kinds))
        for target, name, value in _names(device, places):
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(places)
        stack.enter_context(operations)
        yield device


def _names(device: Device, places: Places) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced: object, name, by what."""
    for name, value in Runtime(device).names.items():
        yield torch.cuda, name, value
    yield torch.accelerator, "is_available", lambda: True
    yield torch.accelerator, "current_accelerator", lambda check_available=False: WHERE
    yield torch.accelerator, "current_stream", lambda _=None: device.stream
    yield torch.cuda.graphs.graph, "default_capture_stream", None
    yield torch._C, "_accelerator_setAllocatorSettings", lambda _: None
    yield torch._C, "_host_emptyCache", lambda: None
    yield torch._C, "_cuda_getCurrentRawStream", lambda _: 0
    yield torch.version, "cuda", "13.0"
    yield torch._C, "_group_tensors_by_device_and_dtype", _grouping(device)
    yield from _groups()
    yield from _autocast()
    yield from _backward(places)
    resize = torch.UntypedStorage.resize_

    def resized(storage: Any, size: int) -> Any:
        found = resize(storage, size)
        device.resized(storage)
        return found

    yield torch.UntypedStorage, "resize_", resized


def _grouping(device: Device) -> Any:
    """What optimizers and clipping ask, in C, for the devices of tensors."""
    group = torch._C._group_tensors_by_device_and_dtype

    def grouped(*given: Any) -> Any:
        found = group(*given)
        return {
            (WHERE if device.holds(lists[0][0]) else where, dtype): (lists, indices)
            for (where, dtype), (lists, indices) in found.items()
        }

    return grouped


def _groups() -> Iterator[tuple[Any, str, Any]]:
    """Gloo in place of NCCL."""
    for name in ("init_process_group", "new_group"):
        real = getattr(dist, name)

        def make(*args: Any, real: Any = real, **options: Any) -> Any:
            args, options = tree_map(_by_gloo, (args, options))
            return real(*args, **options)

        yield dist, name, make


def _by_gloo(value: Any) -> Any:
    return value.replace("nccl", "gloo") if isinstance(value, str) else value


def _autocast() -> Iterator[tuple[Any, str, Any]]:
    """That of the CPU in place of the GPU's."""
    kind = torch.amp.autocast_mode.autocast
    begin = kind.__init__

    def initialise(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    yield kind, "__init__", initialise
    for name in (
        "is_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_enabled",
        "set_autocast_dtype",
    ):
        real = getattr(torch, name)

        def on_cpu(*args: Any, real: Any = real) -> Any:
            return real(*("cpu" if a == "cuda" else a for a in args))

        yield torch, name, on_cpu


def _backward(places: Places) -> Iterator[tuple[Any, str, Any]]:
    """What is called from within a call of torch, where no mode for functions is."""

    def inside(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if places in _get_current_function_mode_stack() else places:
                return function(*args, **kwargs)

        return called

    engine = inside(torch.autograd.graph._engine_run_backward)

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with places.operations.in_backward(outputs):
            return engine(outputs, *args, **kwargs)

    yield torch.autograd, "_engine_run_backward", run
    yield torch.autograd.graph, "_engine_run_backward", run
    hooks = torch.autograd.graph.saved_tensors_hooks
    begin = hooks.__init__

    def initialise(self: Any, pack_hook: Any, unpack_hook: Any) -> None:
        begin(self, inside(pack_hook), inside(unpack_hook))

    yield hooks, "__init__", initialise
