"""What an accelerator does not need for a while, kept in the machine's memory: optimizer state
between steps, activations between forward and backward.

Values come back as they went, to the last bit. Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rloo.config.config import RLOOConfig

# Smaller tensors stay: moving them takes longer than it saves.
SMALLEST = 4096


def check(config: RLOOConfig, device: torch.device) -> None:
    """Raise ValueError where the options would move nothing."""
    for name in ("offload_optimizer", "activation_offloading"):
        if getattr(config, name) and device.type == "cpu":
            raise ValueError(
                f"{name} is true and training runs on a CPU, in whose memory everything is "
                f"already; it is for GPUs ({name}, use_cpu)"
            )
    if config.offload_optimizer and "paged" in config.optim:
        raise ValueError(
            f"offload_optimizer is true and optim is {config.optim}, which moves its state "
            "itself; choose one of the two (offload_optimizer, optim)"
        )


class ParkedState:
    """An optimizer's state, on `device` only while `fetched`."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        # Kept from step to step: page-locked memory is slow to get.
        self._buffers: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def fetched(self) -> Iterator[None]:
        """Inside, the state is where the parameters are."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value is self._buffers.get((id(parameter), name)):
                    state[name] = value.to(self._device, non_blocking=True, copy=True)
        try:
            yield
        finally:
            self.park()

    def park(self) -> None:
        """Move whatever is on the device off it."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if not isinstance(value, Tensor) or value.device.type != self._device.type:
                    continue
                key = (id(parameter), name)
                if value is self._buffers.get(key):
                    continue
                if key not in self._buffers:
                    self._buffers[key] = _host_like(value)
                # Blocking: a checkpoint may read it next.
                state[name] = self._buffers[key].copy_(value)


@contextmanager
def activations_on_host(weights: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Inside, what a forward keeps for the backward moves off `device` until it is asked for.

    `weights` stay where they are, and so does what shares their memory.
    """
    kept = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(tensor: Tensor) -> Any:
        stays = tensor.numel() < SMALLEST or tensor.untyped_storage().data_ptr() in kept
        if stays or tensor.device.type != device.type:
            return tensor
        # In the order of the stream, so nobody writes over `tensor` before it is copied.
        return (_host_like(tensor).copy_(tensor, non_blocking=True),)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        fetched: Tensor = packed[0].to(device, non_blocking=True)
        return fetched

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _host_like(tensor: Tensor) -> Tensor:
    pinned = tensor.device.type == "cuda"
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)
