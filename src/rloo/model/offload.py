"""Offloading to host memory, without changing a bit: optimizer state between steps, activations
between forward and backward, layers of the reference while other layers compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.config.config import RLOOConfig

# Smaller tensors stay on the device: moving them costs more than it saves.
SMALLEST = 4096


def check(config: RLOOConfig, device: torch.device) -> None:
    """Raise ValueError for offload options that would have no effect."""
    moved = [word for word in config.offload if word != "params"]
    for name, value in (
        ("offload", moved),
        ("activation_offloading", config.activation_offloading),
    ):
        if value and device.type == "cpu":
            raise ValueError(
                f"{name} is {value} and training runs on a CPU, in whose memory everything is "
                f"already; it is for GPUs ({name}, use_cpu)"
            )
    if "optimizer" in config.offload and "paged" in config.optim:
        raise ValueError(
            f"offload has optimizer and optim is {config.optim}, which moves its state "
            "itself; choose one of the two (offload, optim)"
        )


class ParkedState:
    """An optimizer's state, which is on `device` only within the context `fetched`."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        # Buffers are reused at every step, because page-locked memory is slow to allocate.
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def fetched(self) -> Iterator[None]:
        """Within this context, the state is on the parameters' device."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value is self._buffers.get((id(parameter), name)):
                    state[name] = value.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self.park()

    def park(self) -> None:
        """Move all state off the device. Waits for the copies, since a checkpoint may read the
        state next."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.device.type != self._device.type:
                    continue
                key = (id(parameter), name)
                if value is self._buffers.get(key):
                    continue
                if key not in self._buffers:
                    self._buffers[key] = _host_like(value)
                state[name] = self._buffers[key].copy_(value, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@contextmanager
def activations_on_host(weights: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Within this context, tensors that a forward saves are moved to the host until the backward.
    `weights` and tensors that share their memory are not moved."""
    kept = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> Any:
        stays = tensor.numel() < SMALLEST or tensor.untyped_storage().data_ptr() in kept
        if stays or tensor.device.type != device.type:
            return tensor
        # An expanded dimension is copied only once. The copy is in the stream before any overwrite.
        one = tensor[tuple(slice(None) if step else slice(1) for step in tensor.stride())]
        return _host_like(one).copy_(one, non_blocking=True), one.stride(), tensor.shape

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, strides, shape = packed
        if not _lies_apart(host.shape, strides):
            return host.to(device, non_blocking=True).expand(shape)
        # The original strides are restored, because some kernels need a mask's rows to be aligned.
        here = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=device)
        return here.copy_(host, non_blocking=True).expand(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def keep_on_host(model: nn.Module, device: torch.device) -> None:
    """Keep the frozen weights of the layers of `model` on the host. A layer's weights are on
    `device` only while this layer computes. Embeddings, final norm and head stay on `device`."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            held = [(p, _host_like(p).copy_(p.detach())) for p in layer.parameters()]
            _put_back(held)
            layer.register_forward_pre_hook(partial(_fetch, held, device))
            layer.register_forward_hook(partial(_put_back, held), always_call=True)


def _fetch(held: list[tuple[nn.Parameter, Tensor]], device: torch.device, *_: Any) -> None:
    for parameter, host in held:
        # Stream order keeps the allocator from reusing memory before its last kernel has run.
        parameter.data = host.to(device, non_blocking=True)


def _put_back(held: list[tuple[nn.Parameter, Tensor]], *_: Any) -> None:
    for parameter, host in held:
        parameter.data = host


def send(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on `device`. The copy to a GPU is asynchronous."""
    if device.type != "cuda" or values.device.type == "cuda":
        return values.to(device)
    # An expanded tensor cannot be page-locked.
    return values.contiguous().pin_memory().to(device, non_blocking=True)


def _lies_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory. False if they do, or if this is uncertain."""
    reached = 0
    for step, size in sorted((t, n) for n, t in zip(shape, strides, strict=True) if n > 1):
        if step <= reached:
            return False
        reached += step * (size - 1)
    return True


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
