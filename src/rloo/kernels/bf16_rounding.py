"""Rounds tensors to bfloat16 values stored as float32, for CPUs whose 16-bit products are slower.
Results that are needed more than once can be cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo.config.config import RLOOConfig
from rloo.kernels import ops
from rloo.kernels.fused_layers import computes


class _Last(NamedTuple):
    """A rounded tensor and its input. The reference to the input prevents reuse of its memory."""

    given: Tensor
    version: int
    found: Tensor

    def is_of(self, x: Tensor) -> bool:
        """Whether x is the same input. Addresses are compared, since autograd makes new tensor
        objects."""
        given = self.given
        place = x.data_ptr(), x.shape, x.stride()
        same = place == (given.data_ptr(), given.shape, given.stride())
        return same and x._version == given._version == self.version


@dataclass(slots=True)
class _Kept:
    """The cache: rounded matrices by address, and the last rounded rows."""

    matrices: dict[int, _Last] = field(default_factory=dict)
    rows: _Last | None = None


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


@contextmanager
def keeping() -> Iterator[None]:
    """In this context, rounded tensors are cached: those of trained weights until the weights
    change, and that of the last rows, which several layers may read."""
    before = _kept.set(_kept.get() or _Kept())
    try:
        yield
    finally:
        _kept.reset(before)


def reduced_precision(config: RLOOConfig) -> torch.dtype | None:
    """The 16-bit dtype of autocast's products (options `bf16`, `fp16`); None if neither option is
    set."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None


def in_float32(rounding: bool) -> AbstractContextManager[Any]:
    """A context without autocast if `rounding` replaces autocast; otherwise a null context."""
    return torch.autocast("cpu", enabled=False) if rounding else nullcontext()


def rounded(x: Tensor) -> Tensor:
    """Return x as float32, rounded to bfloat16 values."""
    if x.dtype == torch.bfloat16:
        return x.float()
    return ops.rounded(x.contiguous()) if computes(x) else x.bfloat16().float()


def round_in_place(x: Tensor) -> None:
    """Round a dense float32 tensor as `rounded` does, in place."""
    if computes(x):
        ops.rounded(x, x)
    else:
        x.copy_(x.bfloat16())


def operands(
    rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a product, rounded: rows, weight and bias."""
    return _rows(rows), *rounded_layer(weight, bias)


def rounded_layer(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias, rounded."""
    return rounded_matrix(weight), None if bias is None else rounded(bias)


def _rows(rows: Tensor) -> Tensor:
    """Return the result of `rounded`, cached for the last rows."""
    if (kept := _kept.get()) is None:
        return rounded(rows)
    if kept.rows is None or not kept.rows.is_of(rows):
        kept.rows = _Last(rows, rows._version, rounded(rows))
    return kept.rows.found


def rounded_matrix(weight: Tensor) -> Tensor:
    """Return the result of `rounded`, cached for a trained weight until the weight changes."""
    if (kept := _kept.get()) is None:
        return rounded(weight)
    last = kept.matrices.get(weight.data_ptr())
    if last is not None and last.is_of(weight):
        return last.found
    found = rounded(weight)
    if weight.requires_grad:
        kept.matrices[weight.data_ptr()] = _Last(weight, weight._version, found)
    return found
