"""The state of a run as plain tensors and JSON values, from which it is restored to the last bit:
optimizers and random number generators; and the version of its weights."""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rloo.distributed import World
from rloo.distributed.sharded_tensor import (
    full_tensor,
    is_sharded,
    numbers_before,
    shape_of,
    shard_like,
    to_local,
)
from rloo.kernels import torch_compat


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of parameters by their ids."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def parameter_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name and shape of every parameter, by which a checkpoint must match a model."""
    return {name: list(shape_of(parameter)) for name, parameter in model.named_parameters()}


def probe(parameters: Sequence[Tensor]) -> Tensor:
    """A fixed sample of parameters, by which changes are noticed: up to 1,024 numbers of each, of
    divided ones those of them that are here."""
    parts = [(to_local(p).flatten(), numbers_before(p)) for p in parameters]
    return torch.cat([part[: max(0, 1024 - before)] for part, before in parts])


def digest(parameters: Sequence[Tensor]) -> str:
    """What tells parameters from others, by the numbers of `probe`."""
    return hashlib.sha256(probe(parameters).float().cpu().numpy().tobytes()).hexdigest()


class WeightsVersion:
    """Numbers the states of a model's weights, in this process alone: two readings are equal only
    if nothing changed between them. Of divided weights all processes read at the same point, and
    the number is the same in all.

    Steps are counted, since kernels of an optimizer's own may leave no trace. All other changes
    (loading, resuming, planning, a callback) are seen: torch counts those made in place, replaced
    memory has another address, and what is written past torch (`.data`) shows in the digest. Only
    such a write that spares the first 1,024 numbers of every parameter goes unseen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self._model = model
        self._world = world
        self._number = 0
        self._seen: object = None
        optimizer.register_step_pre_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self._number += 1
        self._seen = None

    def read(self) -> int:
        """The number of the weights as they are now."""
        parameters = list(self._model.parameters())
        found = [(to_local(p).data_ptr(), p._version) for p in parameters], digest(parameters)
        changed = self._seen not in (None, found)
        if any(is_sharded(p) for p in parameters):
            changed = self._world.any_rank(changed)
        self._number += changed
        self._seen = found
        return self._number


def require_same_shapes(saved: dict[str, list[int]], current: dict[str, list[int]]) -> None:
    """Raise a ValueError that names the first parameter in which two models differ."""
    for name in (*saved, *current):
        there, here = saved.get(name, "absent"), current.get(name, "absent")
        if there != here:
            raise ValueError(
                f"the checkpoint is of another model: parameter {name} is {there} there and "
                f"{here} here (resume_from_checkpoint, model)"
            )


def optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    take: Callable[[Tensor], Tensor] = to_local,
) -> dict[str, Any]:
    """The state of an optimizer by the `names` of its parameters (by id): its live tensors, not
    copies. `take`: what is taken of a divided one (`local`, `gathered`, `as_is`)."""
    saved = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {**group, "params": [order[index] for index in group["params"]]}
        for group in saved["param_groups"]
    ]
    state = {
        order[index]: {
            key: take(value) if isinstance(value, Tensor) else value
            for key, value in of_parameter.items()
        }
        for index, of_parameter in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": groups, "shapes": _shapes(optimizer, names)}


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Mapping[int, str]
) -> None:
    """Restore what `optimizer_state` returned, of whole tensors, bit for bit, including learning
    rates and other settings. Raises a ValueError that names the first parameter with another
    shape."""
    require_same_shapes(state["shapes"], _shapes(optimizer, names))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index = {names[id(p)]: number for number, p in enumerate(parameters)}
    own = {
        index[name]: {key: _part(value, parameters[index[name]]) for key, value in kept.items()}
        for name, kept in state["state"].items()
    }
    groups = [
        {**group, "params": [index[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    others = {key: value for key, value in state.items() if key != "shapes"}
    optimizer.load_state_dict({**others, "state": own, "param_groups": groups})
    # torch's load_state_dict casts the state to the parameter's dtype, which rounds the float32
    # moments of bf16 weights, and otherwise keeps the tensors that it gets.
    for number, kept in own.items():
        present = optimizer.state[parameters[number]]
        for key, saved in kept.items():
            loaded = present.get(key)
            if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)):
                continue
            if loaded is saved or loaded.dtype != saved.dtype:
                present[key] = saved.to(loaded.device, copy=True)


def as_is(tensor: Tensor) -> Tensor:
    """A tensor, whole or divided."""
    return tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor, on the host, in the main process alone; a collective."""
    if not is_sharded(tensor):
        return tensor
    whole = full_tensor(tensor)
    return whole.cpu() if tensor.device_mesh.get_rank() == 0 else whole.new_empty(0)  # type: ignore[attr-defined]


def _part(value: Any, parameter: Tensor) -> Any:
    """A value of the optimizer's state, divided where it has a number for each of a parameter's."""
    alike = isinstance(value, Tensor) and value.shape == parameter.shape
    return shard_like(value, parameter) if alike and not is_sharded(value) else value


def empty_state(
    listed: Mapping[str, tuple[torch.Size, torch.dtype]], named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Room for an optimizer's tensors, which are `listed` as `flatten` has named them, divided as
    the `named` parameters are."""
    found = {}
    for name, (shape, dtype) in listed.items():
        _, *path = name.split("/")
        if name.startswith("/state/"):
            parameter = named[path[1]]
            alike = shape == parameter.shape
            empty = (
                torch.zeros_like(parameter, dtype=dtype)
                if alike
                else torch.zeros(shape, dtype=dtype)
            )
            found[name] = empty.detach()
    return found


class WeightsDiverged(FloatingPointError):
    """The processes of a run have other weights than the main one: nothing of it may be saved."""


class NotFiniteError(FloatingPointError):
    """Weights, or what the optimizer keeps of them, are not finite: nothing of it may be saved."""


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a value that is not finite, None if all are finite; of
    divided ones, as far as they are here."""
    parts = ((name, to_local(tensor)) for name, tensor in tensors)
    named = [(name, part) for name, part in parts if part.is_floating_point() and part.numel()]
    # One number a tensor, and one comparison for all. On a CPU sums are many times as fast,
    # but those of finite numbers may not be finite.
    on_cpu = [t for _, t in named if t.device.type == "cpu"]
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in on_cpu]
    if len(sums) == len(named) and all(map(math.isfinite, map(float, sums))):
        return None
    finite = [True] * len(named)
    # A host waits once for each device, not for each tensor.
    for device in {part.device for _, part in named}:
        places = [n for n, (_, part) in enumerate(named) if part.device == device]
        norms = torch_compat.largest([named[n][1] for n in places])
        found = torch.stack([norm.float() for norm in norms]).isfinite().tolist()
        for place, is_finite in zip(places, found, strict=True):
            finite[place] = is_finite
    return next((name for (name, _), good in zip(named, finite, strict=True) if not good), None)


def capture_rng() -> dict[str, Any]:
    """The states of the global generators of Python, NumPy, torch and torch's CUDA devices."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    key = numpy_state["state"]["key"].tolist()
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the states from `capture_rng`. Warns if the number of CUDA devices has changed."""
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) == devices:
        torch.cuda.set_rng_state_all(state["cuda"])
    else:
        warnings.warn(
            f"the checkpoint has the generator states of {len(state['cuda'])} CUDA devices and "
            f"there are {devices}; their generators are not restored",
            stacklevel=2,
        )


def _shapes(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, list[int]]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {names[id(p)]: list(p.shape) for p in parameters}
