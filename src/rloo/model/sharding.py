"""Weights that are divided among the processes of a run: torch's FSDP2 (`fully_shard`).

Every weight, its gradient and its optimizer state are divided by rows (DTensors). A layer's weights
are gathered before it computes and freed afterwards, in the backward again, whose gradients are
summed into the parts. Outside of a forward, a parameter is the part that a process has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.data.images import is_vision_config
from rloo.dist import World


def check(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose weights cannot be divided."""
    name = type(model).__name__
    if is_vision_config(model.config):
        raise ValueError(
            f"parallel is fsdp2 and {name} reads images, which not every process has at the same "
            "time; its parts would wait for each other (parallel)"
        )
    if not _layers(model):
        raise ValueError(
            f"parallel is fsdp2 and {name} has no layers that transformers marks as such; all of "
            "it would be gathered at once (parallel)"
        )


def shard(module: nn.Module, world: World) -> None:
    """Divide the weights of `module`, which must be called as a whole from now on, layer by layer,
    in place; its parameters become others. What is not a floating-point number (a base of few
    bits) stays whole in every process. Weights are gathered in their own precision."""
    from torch.distributed.fsdp import fully_shard

    few_bits = {p for p in module.parameters() if not p.is_floating_point()}
    options: dict[str, Any] = {"mesh": world.mesh(), "ignored_params": few_bits}
    # The rest (embeddings, head) as well, so that outside of a forward every parameter is a part.
    for part in (*reversed(_layers(module)), module):
        fully_shard(part, reshard_after_forward=True, **options)
    for part in _divided(module):
        # The loss has its divisor: gradients are summed, by what gloo can do as well.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def is_divided(tensor: Tensor) -> bool:
    """Whether this process has only its part of `tensor`."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """The part of this process; of a whole tensor all of it."""
    return tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def numbers_before(tensor: Tensor) -> int:
    """How many numbers of the whole tensor lie before the part of this process."""
    if not is_divided(tensor) or not len(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    rows = -(-len(tensor) // mesh.size())  # of each part, but for the last ones
    return min(rows * mesh.get_local_rank(), len(tensor)) * (tensor.numel() // len(tensor))


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradients. Of divided ones a collective."""
    whole = tensor.detach()
    return whole.full_tensor() if is_divided(whole) else whole  # type: ignore[attr-defined]


def divide(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, which every process has, divided as `like` is."""
    if not is_divided(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    whole = whole.to(local(like).device)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def whole_copy(module: nn.Module) -> Any:
    """A deep copy with whole parameters. Of divided ones a collective."""
    parameters: dict[int, Any] = {}
    for parameter in filter(is_divided, module.parameters()):
        gathered = full(parameter)
        if gathered.data_ptr() == local(parameter).data_ptr():  # of one process
            gathered = gathered.clone()
        parameters[id(parameter)] = nn.Parameter(gathered, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, parameters)


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside, every process has all weights of `module`, and computes with them by itself; without
    gradients. A collective at its start; where nothing is divided it does nothing."""
    parts = _divided(module)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)


def divide_all(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors, which every process has, divided where those of `model` are."""
    like = next((p for p in model.parameters() if is_divided(p)), None)
    return state if like is None else {name: divide(whole, like) for name, whole in state.items()}


def _layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, each of which is gathered at once."""
    return [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]


def _divided(module: nn.Module) -> list[Any]:
    if not any(is_divided(p) for p in module.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in module.modules() if isinstance(m, FSDPModule)]
