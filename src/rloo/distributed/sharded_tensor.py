"""Tensors of which each process of a run may have a part: rows, as torch's FSDP2 (DTensors), or
numbers of all in a row, as DeepSpeed's ZeRO-3 divides them. Whole tensors are left as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor of `shape` is divided: process `rank` of `group` has `piece`, its numbers from
    `rank * step` on, in the memory of its part. The last pieces may be shorter, or empty."""

    piece: Tensor
    step: int
    shape: torch.Size
    rank: int
    group: Any

    @property
    def start(self) -> int:
        """How many numbers of the whole lie before the piece."""
        return min(self.rank * self.step, self.shape.numel())


def sharding(tensor: Tensor) -> Sharding | None:
    """How a tensor is divided, None for one that is whole."""
    found: Any = tensor
    if hasattr(tensor, "ds_tensor"):
        step, rank = found.ds_tensor.ds_numel, dist.get_rank(found.ds_process_group)
        count = max(0, min(step, found.ds_numel - rank * step))
        piece = found.ds_tensor.detach().view(-1)[:count]
        return Sharding(piece, step, found.ds_shape, rank, found.ds_process_group)
    if hasattr(tensor, "device_mesh"):
        mesh = found.device_mesh
        rows = -(-len(found) // mesh.size())
        step = rows * (found.numel() // len(found)) if len(found) else 0
        piece = found.detach().to_local().view(-1)
        return Sharding(piece, step, found.shape, mesh.get_local_rank(), mesh.get_group())
    return None


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only its part of `tensor`."""
    return hasattr(tensor, "device_mesh") or hasattr(tensor, "ds_tensor")


def to_local(tensor: Tensor) -> Tensor:
    """The numbers that this process has, without gradients: of a whole tensor the tensor itself."""
    found = sharding(tensor)
    return tensor.detach() if found is None else found.piece


def numbers_before(tensor: Tensor) -> int:
    """How many numbers of the whole tensor lie before those of this process."""
    found = sharding(tensor)
    return 0 if found is None else found.start


def shape_of(tensor: Tensor) -> torch.Size:
    """That of the whole tensor."""
    return tensor.ds_shape if hasattr(tensor, "ds_shape") else tensor.shape


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradients. Of divided ones a copy, and a collective; it takes no
    more memory than the copy."""
    found = sharding(tensor)
    if found is None:
        return tensor.detach()
    device = torch.device("cpu")
    if dist.get_backend(found.group) != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
    whole = torch.empty(found.shape.numel(), dtype=found.piece.dtype, device=device)
    # torch's gathering is of pieces of one length, and copies what is left without the padding.
    for rank, part in enumerate(whole.split(found.step or 1)):
        if rank == found.rank:
            part.copy_(found.piece)
        dist.broadcast(part, group=found.group, group_src=rank)
    return whole.view(found.shape)


def copy_from_full(tensor: Tensor, whole: Tensor) -> None:
    """Give a tensor the values of a whole one, which every process has, in place."""
    found = sharding(tensor)
    with torch.no_grad():
        if found is None:
            tensor.copy_(whole)
            return
        start, numbers = found.start, whole.reshape(-1)
        found.piece.copy_(numbers[start : start + len(found.piece)])
        if hasattr(tensor, "ds_tensor") and tensor.numel():  # one that DeepSpeed keeps gathered
            tensor.copy_(whole)


def lerp(tensor: Tensor, other: Tensor, share: float) -> None:
    """tensor = (1 - share) * tensor + share * other, in place, of two that are divided alike."""
    to_local(tensor).lerp_(to_local(other), share)
    if hasattr(tensor, "ds_tensor") and tensor.numel():  # one that DeepSpeed keeps gathered
        tensor.data.copy_(full_tensor(tensor))


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, which every process has, divided by rows as `like` is."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    found: Any = like
    whole = whole.to(found.to_local().device)
    return distribute_tensor(whole, found.device_mesh, found.placements, src_data_rank=None)


def shard_all(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors, which every process has, divided by rows where those of `model` are."""
    rows = (p for p in model.parameters() if hasattr(p, "device_mesh"))
    like = next(rows, None)
    return (
        state if like is None else {name: shard_like(whole, like) for name, whole in state.items()}
    )


@contextmanager
def writable(module: nn.Module) -> Iterator[None]:
    """Inside, trained parameters that DeepSpeed has divided are whole, and may be changed by all
    processes alike; a collective."""
    divided = [p for p in module.parameters() if hasattr(p, "ds_tensor") and p.requires_grad]
    if not divided:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(divided, modifier_rank=0):
        yield


def whole_copy(module: nn.Module) -> Any:
    """A deep copy with whole parameters and without hooks. Of divided ones a collective."""
    if not any(map(is_sharded, module.parameters())):
        return copy.deepcopy(module)
    known: dict[int, Any] = {
        id(p): nn.Parameter(full_tensor(p), requires_grad=p.requires_grad)
        for p in module.parameters()
        if is_sharded(p)
    }
    for part in module.modules():
        # What divides them has hooks there, and DeepSpeed parameters in a mapping of its own.
        known |= {id(hooks := getattr(part, name)): type(hooks)() for name in _HOOKS}
        known[id(part._parameters)] = {
            name: copy.deepcopy(parameter, known) for name, parameter in part._parameters.items()
        }
    return copy.deepcopy(module, known)
