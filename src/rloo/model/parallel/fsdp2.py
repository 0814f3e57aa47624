"""Weights that are divided among the processes of a run: torch's FSDP2 (`fully_shard`).

Every weight, its gradient and its optimizer state are divided by rows (DTensors). A layer's weights
are gathered before it computes and freed afterwards, in the backward again, whose gradients are
summed into the parts. Outside of a forward, a parameter is the part that a process has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.data.images import is_vision_config
from rloo.distributed import World
from rloo.distributed.sharded_tensor import is_sharded


def check(model: PreTrainedModel, parallel: str) -> None:
    """Raise ValueError for a model whose weights cannot be divided."""
    name = type(model).__name__
    if is_vision_config(model.config):
        raise ValueError(
            f"parallel is {parallel} and {name} reads images, which not every process has at the "
            "same time; its parts would wait for each other (parallel)"
        )
    if parallel == "zero3" and any(not p.is_floating_point() for p in model.parameters()):
        raise ValueError(
            "parallel is zero3 and the base has few bits, which DeepSpeed does not divide; use "
            "fsdp2, under which it stays whole, or zero2 (parallel, load_in_4bit, load_in_8bit)"
        )
    if parallel == "fsdp2" and not _layers(model):
        raise ValueError(
            f"parallel is fsdp2 and {name} has no layers that transformers marks as such; all of "
            "it would be gathered at once (parallel)"
        )


def shard(module: nn.Module, world: World, *, on_host: bool = False) -> None:
    """Divide the weights of `module`, which must be called as a whole from now on, layer by layer,
    in place; its parameters become others. What is not a floating-point number (a base of few
    bits) stays whole in every process. Weights are gathered in their own precision; `on_host`: from
    host memory, where gradients and the optimizer's state are, too."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    few_bits = {p for p in module.parameters() if not p.is_floating_point()}
    on_gpu = world.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if on_host else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": world.mesh(),
        "ignored_params": few_bits,
        "offload_policy": policy,
    }
    # The rest (embeddings, head) as well, so that outside of a forward every parameter is a part.
    for part in (*reversed(_layers(module)), module):
        fully_shard(part, reshard_after_forward=True, **options)
    for part in _divided(module):
        # The loss has its divisor: gradients are summed, by what gloo can do as well.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


@contextmanager
def whole(module: nn.Module, *, layers: bool = True) -> Iterator[None]:
    """Inside, every process has all weights of `module`, and computes with them by itself; without
    gradients. Without `layers` it has those outside of layers, which are gathered as they compute:
    in all processes alike. A collective at its start; where nothing is divided it does nothing."""
    parts = _divided(module)
    if not layers:
        parts = [part for part in parts if part is module]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, each of which is gathered at once."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def _divided(module: nn.Module) -> list[Any]:
    if not any(is_sharded(p) for p in module.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in module.modules() if isinstance(m, FSDPModule)]
