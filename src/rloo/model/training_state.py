"""The state of optimizers and random number generators as plain tensors and JSON values, restored
bit for bit; and the version number of the weights."""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo.distributed import World
from rloo.distributed.sharded_tensor import (
    first_elements,
    full_tensor,
    is_sharded,
    shape_of,
    shard_like,
    to_local,
    with_sharding_of,
)
from rloo.kernels import torch_compat


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of parameters by their ids."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def parameter_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name and shape of every parameter. Names and shapes of a checkpoint and of the model must be
    equal."""
    return {name: list(shape_of(parameter)) for name, parameter in model.named_parameters()}


def probe(parameters: Sequence[Tensor]) -> Tensor:
    """The first elements of each parameter, up to 1,024, to detect changes. For a sharded
    parameter, only the elements in this process's shard."""
    return torch.cat([first_elements(p, 1024) for p in parameters])


def digest(parameters: Sequence[Tensor]) -> str:
    """A SHA-256 of the result of `probe`. The digest identifies the parameters' values."""
    return hashlib.sha256(probe(parameters).float().cpu().numpy().tobytes()).hexdigest()


class WeightsVersion:
    """A version number of a model's weights, for this process only: two readings are equal only if
    nothing changed between them. With sharded weights reading is a collective, and all processes
    get the same number.

    Optimizer steps are counted, since an optimizer's custom kernels may leave no trace. Other
    changes (loading, resuming, planning, a callback) are detected: torch counts in-place changes,
    replaced memory has another address, and writes that bypass torch's count (`.data`) change the
    digest. A `.data` write is missed only if it changes none of the first 1,024 numbers of any
    parameter.
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
        """The version number of the current weights."""
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
    """The state of an optimizer by parameter name (`names` maps ids to names). Its tensors are
    live, not copies. `take` is the function that reads a sharded tensor (`to_local`, `gathered`,
    `as_is`)."""
    saved = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [
        {**group, "params": [order[index] for index in group["params"]]}
        for group in saved["param_groups"]
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        order[index]: {
            key: take(with_sharding_of(value, parameters[index]))
            if isinstance(value, Tensor)
            else value
            for key, value in of_parameter.items()
        }
        for index, of_parameter in saved["state"].items()
    }
    return {**saved, "state": state, "param_groups": groups, "shapes": _shapes(optimizer, names)}


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], names: Mapping[int, str]
) -> None:
    """Restore the result of `optimizer_state` (full tensors) bit for bit, including learning rates
    and other settings. Raises a ValueError that names the first parameter with another shape."""
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
    # moments of bf16 weights. torch stores state that needs no cast without a copy.
    for number, kept in own.items():
        present = optimizer.state[parameters[number]]
        for key, saved in kept.items():
            loaded = present.get(key)
            if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)):
                continue
            if loaded is saved or loaded.dtype != saved.dtype:
                present[key] = saved.to(loaded.device, copy=True)


def as_is(tensor: Tensor) -> Tensor:
    """Return the tensor itself, sharded or not."""
    return tensor


def gathered(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on the host of the main process. Other processes get an empty tensor.
    A collective."""
    if not is_sharded(tensor):
        return tensor
    whole = full_tensor(tensor)
    return whole.cpu() if dist.get_rank() == 0 else whole.new_empty(0)


def _part(value: Any, parameter: Tensor) -> Any:
    """A value of the optimizer's state, sharded like its parameter if it has the same shape."""
    alike = isinstance(value, Tensor) and value.shape == shape_of(parameter)
    return shard_like(value, parameter) if alike and not is_sharded(value) else value


def empty_state(
    listed: Mapping[str, tuple[torch.Size, torch.dtype]], named: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Zeros for an optimizer's tensors, sharded like the `named` parameters. The keys of `listed`
    are names from `flatten`."""
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
    """Raised if a process's weights differ from the main process's: nothing may be saved."""


class NotFiniteError(FloatingPointError):
    """Raised if weights or the optimizer's state are not finite: nothing may be saved."""


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a value that is not finite, or None. Only this process's
    shards of sharded tensors are checked."""
    parts = ((name, to_local(tensor)) for name, tensor in tensors)
    named = [(name, part) for name, part in parts if part.is_floating_point() and part.numel()]
    # One number per tensor, and one comparison for all. On a CPU sums are many times faster than
    # norms, but the sum of finite numbers may not be finite.
    on_cpu = [t for _, t in named if t.device.type == "cpu"]
    sums = [t.sum(dtype=torch.promote_types(t.dtype, torch.float32)) for t in on_cpu]
    if len(sums) == len(named) and all(map(math.isfinite, map(float, sums))):
        return None
    finite = [True] * len(named)
    # The host synchronizes once per device, not once per tensor.
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
    return {names[id(p)]: list(shape_of(p)) for p in parameters}
