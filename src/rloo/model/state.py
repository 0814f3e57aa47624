"""The state of a run as plain tensors and JSON values, from which it is restored to the last bit:
optimizers and random number generators; and the version of its weights."""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rloo.dist.trees import Flat, flatten, unflatten


def parameter_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Name and shape of every parameter, by which a checkpoint must match a model."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def probe(parameters: Sequence[Tensor]) -> Tensor:
    """A fixed sample of parameters, by which changes are noticed: up to 1,024 numbers of each."""
    return torch.cat([p.detach().flatten()[:1024] for p in parameters])


def digest(parameters: Sequence[Tensor]) -> str:
    """What tells parameters from others, by the numbers of `probe`."""
    return hashlib.sha256(probe(parameters).float().cpu().numpy().tobytes()).hexdigest()


class Version:
    """Numbers the states of a model's weights, in this process alone: two readings are equal only
    if nothing changed between them.

    Steps are counted, since kernels of an optimizer's own may leave no trace. All other changes
    (loading, resuming, planning, a callback) are seen: torch counts those made in place, replaced
    memory has another address, and what is written past torch (`.data`) shows in the digest. Only
    such a write that spares the first 1,024 numbers of every parameter goes unseen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._number = 0
        self._seen: object = None
        optimizer.register_step_pre_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self._number += 1
        self._seen = None

    def read(self) -> int:
        """The number of the weights as they are now."""
        parameters = list(self._model.parameters())
        found = [(p.data_ptr(), p._version) for p in parameters], digest(parameters)
        if self._seen not in (None, found):
            self._number += 1
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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Flat:
    """The state of an optimizer as named tensors (the live ones, not copies) and JSON values."""
    return flatten({**optimizer.state_dict(), "shapes": _optimizer_shapes(optimizer)})


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], meta: Any) -> None:
    """Restore an optimizer's state bit for bit, including learning rates and other settings. Raises
    a ValueError that names the first parameter with another shape."""
    state = unflatten(meta, tensors)
    require_same_shapes(state.pop("shapes"), _optimizer_shapes(optimizer))
    optimizer.load_state_dict(state)
    # torch's load_state_dict casts the state to the parameter's dtype, which rounds the float32
    # moments of bf16 weights, and otherwise keeps the tensors that it gets.
    for saved_group, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(saved_group["params"], group["params"], strict=True):
            for key, saved in state["state"].get(index, {}).items():
                loaded = optimizer.state[parameter].get(key)
                if not (isinstance(saved, Tensor) and isinstance(loaded, Tensor)):
                    continue
                if loaded is saved or loaded.dtype != saved.dtype:
                    optimizer.state[parameter][key] = saved.to(loaded.device, copy=True)


class WeightsApart(FloatingPointError):
    """The processes of a run have other weights than the main one: nothing of it may be saved."""


class NotFinite(FloatingPointError):
    """Weights, or what the optimizer keeps of them, are not finite: nothing of it may be saved."""


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a value that is not finite, None if all are finite."""
    named = [(n, t.detach()) for n, t in tensors if t.is_floating_point() and t.numel()]
    # One number a tensor, and one comparison for all.
    norms = torch._foreach_norm([t for _, t in named], torch.inf) if named else []
    if not norms or bool(torch.stack([n.float().cpu() for n in norms]).isfinite().all()):
        return None
    return next(name for (name, _), norm in zip(named, norms, strict=True) if not norm.isfinite())


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


def _optimizer_shapes(optimizer: torch.optim.Optimizer) -> dict[str, list[int]]:
    # Only optimizers made from named parameters have names.
    shapes = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            names = group.get("param_names")
            name = names[index] if names else f"{index} of group {number}"
            shapes[name] = list(parameter.shape)
    return shapes
