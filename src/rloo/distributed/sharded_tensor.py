"""Sharded tensors: by rows (FSDP2, DTensor) or as a flat slice (DeepSpeed ZeRO-3). The functions
also accept tensors that are not sharded."""

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
    """The sharding of a tensor of `shape`. Process `rank` of `group` has `piece`: the elements of
    the flattened tensor from `rank * step` on. `piece` is a view of the local shard. The last
    pieces may be shorter, or empty."""

    piece: Tensor
    step: int
    shape: torch.Size
    rank: int
    group: Any

    @property
    def start(self) -> int:
        """The number of elements of the full tensor before the piece."""
        return min(self.rank * self.step, self.shape.numel())


def sharding(tensor: Tensor) -> Sharding | None:
    """The sharding of a tensor; None if it is not sharded."""
    found: Any = tensor
    if hasattr(tensor, "ds_tensor"):
        step, rank = found.ds_tensor.ds_numel, dist.get_rank(found.ds_process_group)
        count = max(0, min(step, found.ds_numel - rank * step))
        piece = found.ds_tensor.detach().view(-1)[:count]
        return Sharding(piece, step, found.ds_shape, rank, found.ds_process_group)
    if hasattr(tensor, "device_mesh"):
        mesh, dim = found.device_mesh, found.device_mesh.ndim - 1  # replicas, if any, come first
        rows = -(-len(found) // mesh.size(dim))
        step = rows * (found.numel() // len(found)) if len(found) else 0
        piece = found.detach().to_local().view(-1)
        return Sharding(piece, step, found.shape, mesh.get_local_rank(dim), mesh.get_group(dim))
    return None


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is sharded over the processes."""
    return hasattr(tensor, "device_mesh") or hasattr(tensor, "ds_tensor")


def shard_count(tensor: Tensor) -> int:
    """The number of processes that each have a different shard of a tensor: 1 if all have the
    tensor."""
    found = sharding(tensor)
    return 1 if found is None else dist.get_world_size(found.group)


def to_local(tensor: Tensor) -> Tensor:
    """The local elements of a tensor, without gradients. A tensor that is not sharded is returned
    detached."""
    found = sharding(tensor)
    return tensor.detach() if found is None else found.piece


def numbers_before(tensor: Tensor) -> int:
    """The number of elements of the full tensor before the elements of this process."""
    found = sharding(tensor)
    return 0 if found is None else found.start


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the full tensor."""
    return tensor.ds_shape if hasattr(tensor, "ds_shape") else tensor.shape


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor, without gradients. For a sharded tensor this is a collective. The result is
    then a copy, and no other memory is needed."""
    found = sharding(tensor)
    if found is None:
        return tensor.detach()
    device = torch.device("cpu")
    if dist.get_backend(found.group) != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
    whole = torch.empty(found.shape.numel(), dtype=found.piece.dtype, device=device)
    # torch's all-gather is not used: it needs pieces of equal length, and a second copy without the
    # padding.
    for rank, part in enumerate(whole.split(found.step or 1)):
        if rank == found.rank:
            part.copy_(found.piece)
        dist.broadcast(part, group=found.group, group_src=rank)
    return whole.view(found.shape)


def copy_from_full(tensor: Tensor, whole: Tensor) -> None:
    """Copy the values of the full tensor `whole` into `tensor`. Every process has all of
    `whole`."""
    found = sharding(tensor)
    with torch.no_grad():
        if found is None:
            tensor.copy_(whole)
            return
        start, numbers = found.start, whole.reshape(-1)
        found.piece.copy_(numbers[start : start + len(found.piece)])
        if hasattr(tensor, "ds_tensor") and tensor.numel():  # DeepSpeed has gathered it
            tensor.copy_(whole)


def lerp(tensor: Tensor, other: Tensor, share: float) -> None:
    """tensor = (1 - share) * tensor + share * other, in place; both have the same sharding."""
    to_local(tensor).lerp_(to_local(other), share)
    if hasattr(tensor, "ds_tensor") and tensor.numel():  # DeepSpeed has gathered it
        tensor.data.copy_(full_tensor(tensor))


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Shard `whole` by rows as `like` is sharded (FSDP2). Every process has all of `whole`."""
    if not hasattr(like, "device_mesh"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    found: Any = like
    whole = whole.to(found.to_local().device)
    return distribute_tensor(whole, found.device_mesh, found.placements, src_data_rank=None)


def shard_all(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Shard full tensors by rows if the parameters of `model` are sharded by rows. Otherwise return
    `state` unchanged. Every process must pass all full tensors."""
    rows = (p for p in model.parameters() if hasattr(p, "device_mesh"))
    like = next(rows, None)
    return (
        state if like is None else {name: shard_like(whole, like) for name, whole in state.items()}
    )


@contextmanager
def writable(module: nn.Module) -> Iterator[None]:
    """Gather the trained parameters that DeepSpeed has sharded. Within this context all processes
    may change them, in the same way. A collective."""
    divided = [p for p in module.parameters() if hasattr(p, "ds_tensor") and p.requires_grad]
    if not divided:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(divided, modifier_rank=0):
        yield


def whole_copy(module: nn.Module) -> Any:
    """A deep copy of a module. If the module is sharded, the copy has full parameters and no hooks,
    and the call is a collective."""
    if not any(map(is_sharded, module.parameters())):
        return copy.deepcopy(module)
    known: dict[int, Any] = {
        id(p): nn.Parameter(full_tensor(p), requires_grad=p.requires_grad)
        for p in module.parameters()
        if is_sharded(p)
    }
    for part in module.modules():
        # FSDP2 and DeepSpeed register hooks; DeepSpeed also replaces the mapping of parameters.
        known |= {id(hooks := getattr(part, name)): type(hooks)() for name in _HOOKS}
        known[id(part._parameters)] = {
            name: copy.deepcopy(parameter, known) for name, parameter in part._parameters.items()
        }
    return copy.deepcopy(module, known)
