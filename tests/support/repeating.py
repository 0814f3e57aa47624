"""What a CUDA graph does, without a GPU: the operations of a step are recorded, with the tensors
that they read and write, and done again on the same memory, while no Python of the step runs."""

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# What a device cannot do without the host, which a graph cannot contain.
WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select",
    "aten::equal", "aten::is_nonzero", "aten::unique_dim", "aten::_unique2",
}  # fmt: skip


class Waits(RuntimeError):
    """A step asks for a value."""


class Recorded(TorchDispatchMode):
    """Notes the operations of a block."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name() in WAITING or (func.name() == "aten::index" and _has_mask(args)):
            raise Waits(func.name())
        result = func(*args, **kwargs)
        # The lists of arguments are copied, since callers may change theirs.
        self.calls.append((func, tree_map(lambda x: x, (args, kwargs)), result))
        return result

    @property
    def names(self):
        return [func.name().removeprefix("aten::").split(".")[0] for func, *_ in self.calls]

    @property
    def shapes(self):
        """Of all that is read and made."""
        return [
            (func.name(), [tuple(x.shape) for x in _tensors((args, result))])
            for func, args, result in self.calls
        ]

    def again(self):
        """Do the same on the same memory."""
        for func, (args, kwargs), result in self.calls:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(values):
    return [x for x in tree_flatten(values)[0] if isinstance(x, torch.Tensor)]


def _has_mask(args):
    return any(x is not None and x.dtype == torch.bool for x in args[1])


class Repeating:
    """Takes the place of `rloo.engines.native.graphs.Repeated`; `records` are of all of them."""

    records: ClassVar[list[Recorded]] = []

    def __init__(self, work, device, pool):
        self._work, self._runs, self._record = work, 0, None

    def __call__(self):
        self._runs += 1
        if self._runs == 1:
            self._work()
        elif self._runs == 2:
            with Recorded() as self._record:
                self._work()
            self.records.append(self._record)
        else:
            self._record.again()
