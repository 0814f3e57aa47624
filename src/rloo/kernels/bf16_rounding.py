"""Numbers rounded to bfloat16 and kept in float32, for products of a processor whose own in 16 bits
are slower. What is rounded more than once can be kept."""

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
    """What was rounded: as long as it is held, no other tensor lies there."""

    given: Tensor
    version: int
    found: Tensor

    def is_of(self, x: Tensor) -> bool:
        """Whether it is what x would give. Autograd has another object for the same memory."""
        given = self.given
        place = x.data_ptr(), x.shape, x.stride()
        same = place == (given.data_ptr(), given.shape, given.stride())
        return same and x._version == given._version == self.version


@dataclass(slots=True)
class _Kept:
    """Matrices by their place in memory, and the rows that came last."""

    matrices: dict[int, _Last] = field(default_factory=dict)
    rows: _Last | None = None


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


@contextmanager
def keeping() -> Iterator[None]:
    """Inside, weights that are trained, and what several layers read, are rounded once."""
    before = _kept.set(_kept.get() or _Kept())
    try:
        yield
    finally:
        _kept.reset(before)


def reduced_precision(config: RLOOConfig) -> torch.dtype | None:
    """The 16 bits in which autocast computes products (`bf16`, `fp16`), if any."""
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else None


def in_float32(rounding: bool) -> AbstractContextManager[Any]:
    """Without autocast, where numbers are rounded here in its place."""
    return torch.autocast("cpu", enabled=False) if rounding else nullcontext()


def rounded(x: Tensor) -> Tensor:
    """x as float32, in values of bfloat16."""
    if x.dtype == torch.bfloat16:
        return x.float()
    return ops.rounded(x.contiguous()) if computes(x) else x.bfloat16().float()


def round_in_place(x: Tensor) -> None:
    """`rounded`, of dense float32."""
    if computes(x):
        ops.rounded(x, x)
    else:
        x.copy_(x.bfloat16())


def operands(
    rows: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Those of a product, rounded."""
    return _rows(rows), *rounded_layer(weight, bias)


def rounded_layer(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Those of a product that stay the same for all rows."""
    return rounded_matrix(weight), None if bias is None else rounded(bias)


def _rows(rows: Tensor) -> Tensor:
    """`rounded`, but once of what is the same as the last time."""
    if (kept := _kept.get()) is None:
        return rounded(rows)
    if kept.rows is None or not kept.rows.is_of(rows):
        kept.rows = _Last(rows, rows._version, rounded(rows))
    return kept.rows.found


def rounded_matrix(weight: Tensor) -> Tensor:
    """`rounded`, but once of a weight that is trained and has not changed."""
    if (kept := _kept.get()) is None:
        return rounded(weight)
    last = kept.matrices.get(weight.data_ptr())
    if last is not None and last.is_of(weight):
        return last.found
    found = rounded(weight)
    if weight.requires_grad:
        kept.matrices[weight.data_ptr()] = _Last(weight, weight._version, found)
    return found
