"""float32 products on a CPU by the faster of two libraries.

torch computes them with MKL, which on some processors reaches less than half of what oneDNN does,
which torch has, too, and uses for bfloat16. Which one is used is asked for here alone, by kinds of
products: those of the sampler's `packed` matrices, and those of a layer's `forward` and `backward`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rloo.config.checks import PRODUCTS as KINDS

# A matrix that is not packed is rearranged for each product, which few rows do not repay.
MIN_ROWS = 16
# By this much oneDNN must be faster: a tie goes to MKL, so that two starts on a machine agree.
_MARGIN = 1.25
# Of the measurement: rows and matrix of each kind, how often each library has its turn.
_SHAPES = {"packed": (8, 384, 1024), "forward": (64, 384, 1024), "backward": (64, 384, 1024)}
_TURNS = 7
_in_use: frozenset[str] = frozenset()


def use(kinds: Collection[str]) -> None:
    """Have oneDNN compute products of these kinds from now on, in this process."""
    global _in_use
    _in_use = frozenset(kinds)


def in_use() -> list[str]:
    """The kinds that oneDNN computes."""
    return [kind for kind in KINDS if kind in _in_use]


def packs(matrix: Tensor) -> bool:
    """Whether oneDNN is to multiply by this one."""
    kinds = (torch.float32, torch.bfloat16)
    return "packed" in _in_use and matrix.device.type == "cpu" and matrix.dtype in kinds


def pack(matrix: Tensor) -> Tensor:
    """A matrix (N, K) in oneDNN's own order, for `multiply`."""
    return torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), MIN_ROWS)


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ matrix.T + bias by oneDNN, without gradients: (T, K) and (N, K), perhaps packed, give
    (T, N)."""
    return torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")


def multiplies(kind: str, rows: int) -> bool:
    """Whether oneDNN computes products of this kind with so many rows."""
    return kind in _in_use and rows >= MIN_ROWS


class _Product(torch.autograd.Function):
    """`F.linear` of (T, K) and (N, K), with gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        if "forward" in _in_use:
            return multiply(rows, weight, bias)
        return F.linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        by_onednn = "backward" in _in_use
        if ctx.needs_input_grad[0]:
            of_rows = multiply(grad, weight.t()) if by_onednn else grad @ weight
        if ctx.needs_input_grad[1]:
            of_weight = outer(grad, rows) if by_onednn else grad.t() @ rows
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0)
        return of_rows, of_weight, of_bias


def outer(grad: Tensor, rows: Tensor) -> Tensor:
    """grad.T @ rows by oneDNN: the wider of the two is the matrix."""
    if grad.shape[1] > rows.shape[1]:
        return multiply(rows.t(), grad.t()).t()
    return multiply(grad.t(), rows.t())


class Linear(nn.Linear):
    """`nn.Linear`, which it is but for the library that computes."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        weight = self.weight
        rows = input.numel() // self.in_features
        if (
            rows < MIN_ROWS
            or not _in_use & {"forward", "backward"}
            or not input.dtype == weight.dtype == torch.float32
            or weight.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(input)
        output = _Product.apply(input.reshape(rows, -1), weight, self.bias)
        return output.view(*input.shape[:-1], -1)


def install(model: nn.Module) -> None:
    """Have the layers of `model` that are `nn.Linear`, and no class of another's, ask here."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


@cache
def choose() -> list[str]:
    """The kinds that oneDNN computes faster here by one thread, measured for some hundredths of a
    second; none where torch has no oneDNN, or what it computes is not the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are disturbed by whatever else runs
    try:
        return [kind for kind in KINDS if _is_faster(kind)]
    finally:
        torch.set_num_threads(threads)


def _is_faster(kind: str) -> bool:
    rows, width, height = _SHAPES[kind]
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, width), (height, width), (rows, height))
    a, b, c = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        if kind == "backward":
            theirs, ours = lambda: [c @ b, c.t() @ a], lambda: [multiply(c, b.t()), outer(c, a)]
        else:
            matrix = pack(b) if kind == "packed" else b
            theirs, ours = lambda: [F.linear(a, b)], lambda: [multiply(a, matrix)]
        if not all(map(_are_close, ours(), theirs())):
            return False
    except (AttributeError, NotImplementedError, RuntimeError):  # a torch without it
        return False
    seconds = [(_seconds(theirs), _seconds(ours)) for _ in range(_TURNS)]
    return min(one for one, _ in seconds) > _MARGIN * min(other for _, other in seconds)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
