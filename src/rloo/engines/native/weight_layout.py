"""The decoder's matrices, in the memory layout of the library that multiplies by them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo import kernels
from rloo.kernels import cpu_matmul
from rloo.kernels.decode import PackedMatrix, columns

# On a CPU, with fewer rows than this, the matrix is the left factor, since two threads divide this
# product better. With more rows, transposing the result takes longer than is saved.
_FEW_ROWS = 48


class LinearOp(Protocol):
    """A linear operation on rows of tokens (T, K), with a weight (N, K) and an optional bias
    (N,)."""

    def times(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias: (T, N)."""

    def added(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden + rows @ weight.T + bias: (T, N)."""

    def gated(self, rows: Tensor) -> Tensor:
        """The first half of the columns that `times` returns, after SiLU, multiplied by the second
        half: (T, N / 2)."""

    @property
    def hidden_bytes(self) -> int:
        """Bytes that torch's allocation statistics do not count."""


def make_linear_op(
    weight: Tensor, bias: Tensor | None, precise: torch.dtype, *, gated: bool = False
) -> LinearOp:
    """Make a LinearOp with results of dtype `precise`. With `gated`, only the method `gated` may be
    called."""
    if can_pack(weight, precise) and not (gated and len(weight) % columns()):
        return PackedMatrix(weight, bias, gated=gated)
    return PackedLinear(weight, bias, precise)


def can_pack(weight: Tensor, precise: torch.dtype) -> bool:
    """Whether the C kernels can multiply by this weight."""
    known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return known and precise == torch.float32 and kernels.in_use()


class PackedLinear:
    """A weight (N, K) and an optional bias (N,). Rows of tokens (T, K) may have any dtype. Products
    have the dtype of the weight, and results the dtype `precise`. For oneDNN the weight is a packed
    copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precise: torch.dtype) -> None:
        self._dtype, self._precise = weight.dtype, precise
        self._packed = cpu_matmul.packs(weight)
        self._weight = cpu_matmul.pack(weight) if self._packed else weight
        self._bias = bias

    @property
    def hidden_bytes(self) -> int:
        """Bytes that torch's statistics do not count: the copy in oneDNN's layout."""
        return self._weight.numel() * self._weight.itemsize if self._packed else 0

    def times(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias: (T, N)."""
        rows = rows.to(self._dtype)
        if self._packed:
            result = cpu_matmul.multiply(rows, self._weight).to(self._precise)
        elif len(rows) < _FEW_ROWS and rows.device.type == "cpu":
            result = (self._weight @ rows.t()).t().to(self._precise)
        else:
            result = F.linear(rows, self._weight).to(self._precise)
        return result if self._bias is None else result.add_(self._bias)

    def gated(self, rows: Tensor) -> Tensor:
        """The first half of the columns that `times` returns, after SiLU, multiplied by the second
        half: (T, N / 2)."""
        gate, up = self.times(rows).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def added(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden + rows @ weight.T + bias: (T, N)."""
        rows = rows.to(self._dtype)
        if self._packed:
            hidden = cpu_matmul.multiply(rows, self._weight).to(self._precise).add_(hidden)
        elif self._dtype == hidden.dtype:
            hidden = torch.addmm(hidden, rows, self._weight.t())
        else:
            hidden = hidden + rows @ self._weight.t()
        return hidden if self._bias is None else hidden.add_(self._bias)
