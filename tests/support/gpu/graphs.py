"""CUDA graphs of a pretended GPU: operations as they were launched, done again on their memory."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from support.gpu.device import Device, storage_of


class Pools(Protocol):
    """The memory that graphs have in common."""

    on_default_stream: bool

    def new_pool(self) -> Any: ...

    def enter_pool(self, pool: Any) -> None: ...

    def leave_pool(self, pool: Any) -> None: ...


class Place:
    """A tensor that a graph reads and does not own: found again by its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(storage_of(tensor))
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._size, self._stride = tensor.size(), tensor.stride()

    def find(self, device: Device) -> torch.Tensor:
        """The tensor as it is now. Raises RuntimeError where its memory was freed."""
        storage = self._storage()
        if storage is None:
            device.refuse(f"a replayed graph reads memory that was freed: {tuple(self._size)}")
        empty = torch.empty(0, dtype=self._dtype)
        return empty.set_(storage, self._offset, self._size, self._stride)


class Graph:
    """Operations as they were launched in a capture, done again with the same memory by `replay`;
    nothing that Python computes beside them is."""

    def __init__(self, device: Device, pools: Pools) -> None:
        self._pools, self._device = pools, device
        self._pool: Any = None
        self._launched: list[Any] = []
        self._own: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        """Record from here on."""
        if self._pools.on_default_stream:
            self._device.refuse("CUDA graphs must be captured on a non-default stream")
        self._device.refuse_in_capture("capture_begin")
        self._pool = pool if pool is not None else self._pools.new_pool()
        self._pools.enter_pool(self._pool)
        self._device.captures += 1
        self._inference = torch.is_inference_mode_enabled()
        self._device.capturing = self

    def spare(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remember what an operation is about to overwrite: a capture computes nothing."""
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(given):
                key = _key(tensor)
                if key not in self._own and key not in self._before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage_of(tensor))
                    self._before[key] = whole, whole.clone()

    def own(self, found: Any) -> None:
        """Keep memory that was given in the capture."""
        self._kept += _tensors(found)
        self._own |= {_key(tensor) for tensor in _tensors(found)}

    def record(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Keep one operation; what it made is the graph's."""
        known = {_key(t) for t in _tensors((args, kwargs))} | self._own

        def place_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or _key(value) in self._own:
                return value
            # A number of the host is given to the kernel as it is.
            return Place(value) if self._device.holds(value) else value

        args, kwargs = tree_map(place_of, (args, kwargs))
        made = [(n, t) for n, t in enumerate(_tensors(found)) if _key(t) not in known]
        self.own([t for _, t in made])
        self._launched.append((func, args, kwargs, made))

    def capture_end(self) -> None:
        """Record no more."""
        self._device.capturing = None
        with torch._C._DisableTorchDispatch():
            for whole, before in self._before.values():
                whole.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Launch all again. Raises RuntimeError where what they read was freed."""
        device = self._device
        device.replays += 1
        device.launches[device.phase] += 1

        def value_of(kept: Any) -> Any:
            return kept.find(device) if isinstance(kept, Place) else kept

        with (
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch.inference_mode(self._inference),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            for func, args, kwargs, made in self._launched:
                args, kwargs = tree_map(value_of, (args, kwargs))
                again = _tensors(func(*args, **kwargs))
                for number, kept in made:
                    kept.copy_(again[number])

    def pool(self) -> Any:
        """The pool that it was captured into."""
        return self._pool

    def reset(self) -> None:
        """Destroy what was recorded."""
        self._launched.clear()
        self._kept.clear()
        if self._pool is not None:
            self._pools.leave_pool(self._pool)
            self._pool = None

    __del__ = reset


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    key: int = storage_of(tensor)._cdata
    return key
