"""Weights sharded over the processes of a run by torch's FSDP2 (`fully_shard`).

Every weight, its gradient and its optimizer state are sharded by rows (DTensors). A layer's weights
are gathered before its forward and before its backward, and freed after each. Gradients are summed
into the shards. Outside of a forward, a parameter contains only this process's shard. With several
groups of processes that each have all shards (HSDP), weights are gathered within a group, and the
gradients of a step are summed over the groups once.
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
    """Raise ValueError for a model whose weights cannot be sharded."""
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
    """Shard the weights of `module` layer by layer, in place. The parameters are replaced.
    Afterwards only `module` itself may be called, not its submodules. Weights that are not
    floating-point (a quantised base) stay replicated. Weights are gathered in their own precision.
    If `on_host` is true, the shards, gradients and optimizer state are in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    few_bits = {p for p in module.parameters() if not p.is_floating_point()}
    on_gpu = world.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if on_host else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": world.mesh(),
        "ignored_params": few_bits,
        "offload_policy": policy,
    }
    # Embeddings and head are sharded too, so every parameter is a shard outside of a forward.
    for part in (*reversed(_layers(module)), module):
        fully_shard(part, reshard_after_forward=True, **options)
    for part in _divided(module):
        # The loss is already divided by the count over all processes, so gradients are summed, not
        # averaged. gloo supports sums too.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def sum_over_replicas(module: nn.Module, *, now: bool) -> None:
    """Set whether the next backward sums gradients over the groups that each have all shards. If
    not, its sums within the group are added in a later backward."""
    for part in _divided(module):
        part.set_requires_all_reduce(now, recurse=False)


@contextmanager
def whole(module: nn.Module, *, layers: bool = True) -> Iterator[None]:
    """Within this context, every process has all weights of `module` and can compute with them
    independently, without gradients. If `layers` is false, only weights outside of layers are
    gathered at the start. Each layer is gathered when it computes, so all processes must run the
    same computation. Entering the context is a collective. The context does nothing if no weight is
    sharded."""
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
    """The layers of a transformers model. The weights of a layer are gathered together."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def _divided(module: nn.Module) -> list[Any]:
    if not any(is_sharded(p) for p in module.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in module.modules() if isinstance(m, FSDPModule)]
