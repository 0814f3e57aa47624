"""Where tensors are, and what their operations do to a device: torch's calls for places
(`LoadBalancer`) and its operations (`Operations`), as they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from support.gpu.device import WHERE, Device, place
from support.gpu.rules import alerts, is_not_deterministic

CPU = torch.device("cpu")
# Operations whose result has the host wait: it is a number, or its shape follows from values.
WAITING = {
    "aten::_local_scalar_dense": "item", "aten::nonzero": "nonzero", "aten::_unique2": "unique",
    "aten::unique_dim": "unique", "aten::unique_consecutive": "unique",
    "aten::masked_select": "masked_select", "aten::equal": "equal", "aten::bincount": "bincount",
    "aten::repeat_interleave": "repeat_interleave",
}  # fmt: skip
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# What may have tensors on two devices, beside numbers (tensors without dimensions) of the host.
CROSSING = {"aten::copy_", "aten::_to_copy", "aten::set_", "aten::detach", *INDEXING}
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
NO_KERNEL = (
    "detach", "alias", "_unsafe_view", "set_", "resize_", "lift_fresh", "is_same_size",
)  # fmt: skip
# Factories that copy what they are given.
COPYING = ("tensor", "as_tensor", "asarray", "new_tensor")


class Operations(TorchDispatchMode):
    """Every operation, forward and backward, is seen here."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        # Whether what is made of no tensor is made on the device.
        self.making = False
        # In a backward, where torch makes zeros for gradients of the device in C.
        self.backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # what is inside comes here next
        if torch.is_inference_mode_enabled() and is_composed(func):
            with self:  # elsewhere its parts come here by themselves
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [self._device.holds(t) for t in tensors]
        made_here = self.making or (self.backward and not tensors)
        if not any(here) and not made_here:
            return func(*args, **kwargs)
        name = func._schema.name
        if any(here):
            self._check(name, func, args, tensors, here)
        if name == "aten::copy_":
            return self._copy(func, args, kwargs)
        if name in WAITING and kwargs.get("output_size") is None:
            self._device.wait(WAITING[name])
        elif name in INDEXING:
            self._index(args)
        self._spare(func, args, kwargs)
        if name in PRODUCTS and uses_tf32():
            args = tree_map(rounded, args)
        if name == "aten::histc" and not args[0].is_floating_point():  # which no CPU has
            found = func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
        else:
            found = func(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return found
        for made in tree_leaves(found):
            if isinstance(made, torch.Tensor):
                self._device.put(made)
        self._launch(func, args, kwargs, found)
        return found

    @contextmanager
    def in_backward(self, outputs: Any) -> Iterator[None]:
        """A backward from these, or with () what Python calls in it."""
        before, self.backward = self.backward, any(map(self._device.holds, outputs))
        try:
            yield
        finally:
            self.backward = before

    def _spare(self, func: Any, args: Any, kwargs: Any) -> None:
        if self._device.capturing is not None:
            self._device.capturing.spare(func, args, kwargs)

    def _launch(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        device = self._device
        if device.capturing is not None and allocates(func):
            device.capturing.own(found)
        if not launches(func):
            return
        device.launches[device.phase] += 1
        device.operations[device.phase, func._schema.name] += 1
        if device.capturing is not None:
            device.capturing.record(func, args, kwargs, found)

    def _check(self, name: str, func: Any, args: Any, tensors: list[Any], here: list[bool]) -> None:
        others = [t for t, on in zip(tensors, here, strict=True) if not on and t.dim() > 0]
        if others and name not in CROSSING:
            self._device.mixed += 1
            places = ["cuda:0" if on else "cpu" for on in here]
            found = [(tuple(t.shape), p) for t, p in zip(tensors, places, strict=True)]
            self._device.refuse(f"{func}: expected all tensors to be on the same device: {found}")
        if alerts() and is_not_deterministic(name, func, args):
            self._device.refuse(f"{name} does not have a deterministic implementation")

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source = args[:2]
        device = self._device
        to, out = device.holds(target), device.holds(source)
        later = (args[2] if len(args) > 2 else False) or kwargs.get("non_blocking", False)
        if to and out:
            self._spare(func, args, kwargs)
            found = func(*args, **kwargs)
            self._launch(func, args, kwargs, found)
            return found
        device.launches[device.phase] += 1
        self.carry(target, source, bool(later))
        return target

    def carry(self, target: torch.Tensor, source: torch.Tensor, later: bool) -> None:
        """Copy between host and device."""
        device, away = self._device, not self._device.holds(target)
        host = target if away else source
        if later and device.is_pinned(host):
            device.refuse_in_capture("a copy between host and device")
            if away:
                device.copy_later(target, source)
            else:
                device.arrive()
                target.copy_(source)
            return
        device.wait("copy to the host" if away else "copy to the device")
        target.copy_(source)

    def _index(self, args: Any) -> None:
        for index in args[1]:
            if not isinstance(index, torch.Tensor):
                continue
            if index.dtype in (torch.bool, torch.uint8):
                self._device.wait("an index of truth values")
            elif index.dim() and not self._device.holds(index):
                self._device.wait("an index of the host")


def uses_tf32() -> bool:
    """Whether products of float32 matrices are set to round their operands."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def rounded(value: Any) -> Any:
    """A matrix of float32 with 10 bits behind the point, as a tensor core reads it."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or value.dim() < 2:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@cache
def is_composed(func: Any) -> bool:
    """Whether an operation is made of others."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def launches(func: Any) -> bool:
    """Whether an operation starts a kernel: not a view, nor memory alone."""
    name = func._schema.name.rsplit("::")[-1]
    return not (func.is_view or allocates(func) or name in NO_KERNEL)


def allocates(func: Any) -> bool:
    """Whether it gives memory, whatever is in it."""
    return func._schema.name.rsplit("::")[-1].startswith(("empty", "new_empty"))


class Places(TorchFunctionMode):
    """Every call of torch that asks for a place or names one."""

    def __init__(self, device: Device, operations: Operations) -> None:
        super().__init__()
        self._device, self.operations = device, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._ask(func, args)
        method = getattr(self, f"_do_{name}", None)
        if method is not None:
            return method(func, args, kwargs)
        if kwargs.get("pin_memory"):
            kwargs["device"] = kwargs.get("device") or CPU
        if kwargs.get("device") is not None:
            return self._make(name, func, args, kwargs)
        with self.operations.in_backward(()):
            return func(*args, **kwargs)

    def _ask(self, func: Any, args: Any) -> Any:
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked in ("device", "is_cuda", "is_cpu") and self._device.holds(args[0]):
            return WHERE if asked == "device" else asked == "is_cuda"
        return func(*args)

    def _make(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor on the device that is named."""
        if device_of(kwargs["device"]).type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        there = device_of(kwargs["device"]).type == "cuda"
        pinned = kwargs.pop("pin_memory", False)
        kwargs["device"] = CPU
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if name not in COPYING:
            before, self.operations.making = self.operations.making, there
            try:
                with nullcontext() if there else torch._C._DisableTorchDispatch():
                    made = func(*args, **kwargs)
            finally:
                self.operations.making = before
            return self._device.pin(made) if pinned else made
        was_there = bool(given) and self._device.holds(given[0])
        with torch._C._DisableTorchDispatch():
            made = func(*args, **kwargs)
            if there != was_there:
                self._device.wait("a tensor of numbers" if there else "copy to the host")
                made = made.clone() if given and made is given[0] else made
        return self._device.put(made) if there else made

    def _do_to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, dtypes, flags = args[0], [], [x for x in args[1:] if isinstance(x, bool)]
        wanted = kwargs.get("device")
        for given in args[1:]:
            if isinstance(given, torch.Tensor):
                wanted = WHERE if self._device.holds(given) else given.device
                dtypes = [given.dtype]
            elif isinstance(given, torch.dtype):
                dtypes = [given]
            elif isinstance(given, (torch.device, str)) or type(given) is int:
                wanted = given
        if wanted is None or device_of(wanted).type not in ("cuda", "cpu"):
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        later = kwargs.pop("non_blocking", False) or bool(flags and flags[0])
        copies = kwargs.pop("copy", False) or (len(flags) > 1 and flags[1])
        changed = func(tensor, *dtypes, **kwargs) if dtypes or kwargs else tensor
        to = device_of(wanted).type == "cuda"
        if to != self._device.holds(tensor):
            return self._move(changed, to, later)
        return changed.clone() if copies and changed is tensor else changed

    def _do_cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        later = kwargs.get("non_blocking", False)
        return args[0] if self._device.holds(args[0]) else self._move(args[0], True, later)

    def _do_cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._move(args[0], False, False) if self._device.holds(args[0]) else args[0]

    def _move(self, tensor: torch.Tensor, to: bool, later: bool) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Move.apply(tensor, self, to, later)
            return moved
        return self.moved(tensor, to, later)

    def moved(self, tensor: torch.Tensor, to: bool, later: bool) -> torch.Tensor:
        """A copy on the other side, without gradients."""
        device = self._device
        with torch._C._DisableTorchDispatch():
            made = torch.empty_like(tensor.detach(), device=CPU, requires_grad=False)
            if to:
                device.put(made)
            self.operations.carry(made, tensor.detach(), later)
        device.launches[device.phase] += 1
        return made

    def _do_pin_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._device.holds(args[0]):
            self._device.refuse(
                "cannot pin 'torch.cuda.FloatTensor': only CPU tensors can be pinned"
            )
        if any(n > 1 and not step for n, step in zip(args[0].shape, args[0].stride(), strict=True)):
            self._device.refuse(  # a copy of the same strides is made, and written to
                "unsupported operation: more than one element of the written-to tensor refers to a "
                "single memory location"
            )
        return self._device.pin(args[0].clone())

    def _do_is_pinned(self, func: Any, args: Any, kwargs: Any) -> bool:
        return self._device.is_pinned(args[0])

    def _do_get_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        return 0 if self._device.holds(args[0]) else func(*args, **kwargs)

    def _do_record_stream(self, func: Any, args: Any, kwargs: Any) -> None:
        return None

    def _do_tolist(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._device.holds(args[0]):
            self._device.wait("tolist")
        return func(*args, **kwargs)

    def _do_numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._device.holds(args[0]):
            self._device.refused.append(f"numpy of a tensor on the device ({place()})")
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return func(*args, **kwargs)

    _do___array__ = _do_numpy


class _Move(torch.autograd.Function):
    """Between host and device, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, places: Places, to: bool, later: bool) -> Any:
        ctx.places, ctx.to, ctx.later = places, to, later
        return places.moved(tensor, to, later)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.places.moved(gradients[0], not ctx.to, ctx.later), None, None, None


def device_of(named: Any) -> torch.device:
    """A device from whatever names one."""
    return torch.device("cuda", named) if type(named) is int else torch.device(named)
