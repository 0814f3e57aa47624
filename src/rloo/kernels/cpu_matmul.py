"""Products on a CPU by the faster of two libraries.

torch computes them with MKL, which on some processors reaches less than half of what oneDNN does,
which torch has, too, and uses for bfloat16. Which one is used is asked for here alone, by kinds of
products, those of the sampler's `packed` matrices, of a layer's `forward`, of the gradients of its
rows (`backward`) and of its matrix (`weight`), and by classes of shapes: `some` rows or `many`, a
`narrow` matrix or a `wide` one.

Autocast's products in bfloat16 are oneDNN's where that is said to be faster (`bf16`). On processors
on which it is not they are float32's of numbers that were rounded to bfloat16: of the same numbers,
with results that are not rounded, and what lies between them stays in float32.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rloo.config.validation import OF_LAYERS, PRODUCTS
from rloo.distributed.sharded_tensor import is_sharded
from rloo.kernels import torch_compat, tuning_cache
from rloo.kernels.bf16_rounding import in_float32, operands, rounded, rounded_matrix

KINDS = tuple(PRODUCTS)
# A matrix that is not packed is rearranged for each product, which few rows do not repay.
MIN_ROWS = 16
MANY_ROWS = 256
# The longer side of a matrix, for instance the vocabulary, that makes it a wide one.
WIDE = 4096
# Rows whose gradients are multiplied at once: they are copied transposed.
BLOCK_ROWS = 1024
# By this much oneDNN must be faster: a tie goes to MKL.
_MARGIN = 1.04
# Of the measurement: rows and matrices of each class, how often each library has its turn, at least
# and at most, and between which ratios more turns are taken.
_ROWS = {"packed": (4, 64), "some": (MIN_ROWS, 64), "many": (MANY_ROWS,)}
_ROWS["bf16"] = _ROWS["many"]
_MATRICES = {"narrow": (384, 1024), "wide": (384, WIDE)}
_TURNS, _MOST_TURNS, _UNCLEAR = 3, 15, (0.9, 1.25)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ROUNDED = {torch.float32, torch.bfloat16}
_in_use: frozenset[str] = frozenset()

Matrix = tuple[Tensor, Tensor | None]


def use(names: Collection[str]) -> None:
    """Have oneDNN compute products of these kinds, or classes of them, from now on, in this
    process."""
    global _in_use
    _in_use = frozenset(each for name in names for each in PRODUCTS.get(name, (name,)))


def in_use() -> list[str]:
    """What oneDNN computes: kinds, or the classes of those of which it does not compute all."""
    return _names(_in_use)


def _names(classes: Collection[str]) -> list[str]:
    found = []
    for kind, all_of_it in PRODUCTS.items():
        own = [each for each in all_of_it if each in classes]
        found += [kind] if len(own) == len(all_of_it) else own
    return found


def _width(matrix: Tensor) -> str:
    return "wide" if max(matrix.shape) >= WIDE else "narrow"


def packs(matrix: Tensor) -> bool:
    """Whether oneDNN is to multiply by this one."""
    asked = f"packed:{_width(matrix)}" in _in_use
    return asked and matrix.device.type == "cpu" and can_pack(matrix.dtype)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has an order of its own for matrices of this dtype, which for bfloat16 only
    some processors give it."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    ones = torch.ones(MIN_ROWS, MIN_ROWS, dtype=dtype)
    try:
        multiply(ones, pack(ones))
    except RuntimeError:
        return False
    return True


def pack(matrix: Tensor) -> Tensor:
    """A matrix (N, K) in oneDNN's own order, for `multiply`."""
    packed: Tensor = torch_compat.pack_matrix(matrix.contiguous(), MIN_ROWS)
    return packed


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ matrix.T + bias by oneDNN, without gradients: (T, K) and (N, K), perhaps packed, give
    (T, N)."""
    product: Tensor = torch_compat.multiply_packed(rows, matrix, bias, "none", [], "")
    return product


def multiplies(kind: str, rows: int, matrix: Tensor) -> bool:
    """Whether oneDNN computes products of this kind, of a layer, of so many rows."""
    shape = f"{'many' if rows >= MANY_ROWS else 'some'}:{_width(matrix)}"
    return rows >= MIN_ROWS and f"{kind}:{shape}" in _in_use


def rounds() -> bool:
    """Whether an autocast to bfloat16 is in force whose products are float32's."""
    return (
        "bf16" not in _in_use
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
    )


def forward(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows @ weight.T + bias, without gradients, by the library that is in use for it."""
    by_onednn = multiplies("forward", len(rows), weight)
    return (multiply if by_onednn else F.linear)(rows, weight, bias)


def backward(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the rows, the same: grad @ weight."""
    by_onednn = multiplies("backward", len(grad), weight)
    return multiply(grad, weight.t()) if by_onednn else grad @ weight


def backward_to_weight(grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight, the same: grad.T @ rows."""
    by_onednn = multiplies("weight", len(grad), weight)
    return outer(grad, rows) if by_onednn else grad.t() @ rows


class _CPUMatmul(torch.autograd.Function):
    """`F.linear` of (T, K) and (N, K), with gradients; `rounds`: of rounded numbers."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, rounds: bool
    ) -> Tensor:
        matrix = weight
        if rounds:
            rows, matrix, bias = operands(rows, weight, bias)
        ctx.save_for_backward(rows, weight)  # not what was rounded, which would be held for each
        ctx.rounds = rounds
        return forward(rows, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        if ctx.rounds:
            grad, weight = rounded(grad), rounded_matrix(weight)
        wanted = ctx.needs_input_grad
        of_rows = backward(grad, weight) if wanted[0] else None
        of_weight = backward_to_weight(grad, rows, weight) if wanted[1] else None
        return of_rows, of_weight, grad.sum(0) if wanted[2] else None, None


def outer(grad: Tensor, rows: Tensor) -> Tensor:
    """grad.T @ rows: the wider of the two is the matrix. Both are copied in oneDNN's order, so it
    is done block by block."""
    swapped = grad.shape[1] > rows.shape[1]
    one, other = (rows, grad) if swapped else (grad, rows)
    total: Tensor | None = None
    for left, right in zip(one.split(BLOCK_ROWS), other.split(BLOCK_ROWS), strict=True):
        part = multiply(left.t(), right.t())
        total = part if total is None else total.add_(part)
    assert total is not None
    return total.t() if swapped else total


class CPULinear(nn.Linear):
    """`nn.Linear`, which it is but for the library that computes."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        if self.weight.device.type != "cpu":
            return super().forward(input)
        rounding = rounds() and {input.dtype, self.weight.dtype} <= _ROUNDED
        if not rounding and not self._is_for_onednn(input):
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        with in_float32(rounding):
            output = _CPUMatmul.apply(rows, self.weight, self.bias, rounding)
        return output.view(*input.shape[:-1], -1)

    def _is_for_onednn(self, input: Tensor) -> bool:
        """Whether it computes a float32 product of these, or that of its gradients."""
        rows = input.numel() // self.in_features
        return (
            rows >= MIN_ROWS
            and bool(_in_use)
            and input.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and any(multiplies(kind, rows, self.weight) for kind in OF_LAYERS)
        )


def matrix_of(module: Any) -> Matrix | None:
    """Matrix and bias of a layer whose forward is that product and no more: of an `nn.Linear` in
    float32 on a CPU that nobody watches and that is whole. Where autocast `rounds`, they are to be
    rounded, and may have been."""
    if type(module) not in (nn.Linear, CPULinear) or any(map(module.__dict__.get, _HOOKS)):
        return None
    rounding = rounds()
    known = _ROUNDED if rounding else {torch.float32}
    given = [module.weight] if module.bias is None else [module.weight, module.bias]
    for tensor in given:
        whole = type(tensor) is nn.Parameter and not is_sharded(tensor)
        if not whole or tensor.dtype not in known or tensor.device.type != "cpu":
            return None
    if (torch.is_autocast_enabled("cpu") and not rounding) or torch.compiler.is_compiling():
        return None
    return module.weight, module.bias


def install(model: nn.Module) -> None:
    """Have the layers of `model` that are `nn.Linear`, and no class of another's, ask here."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = CPULinear


@cache
def unavailable_reason() -> str | None:
    """Why oneDNN cannot compute products here, or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * MIN_ROWS, 24), (40, 24), (2 * MIN_ROWS, 40))
    rows, matrix, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    try:
        ours = multiply(rows, pack(matrix)), multiply(grad, matrix.t()), outer(grad, rows)
    except (TypeError, NotImplementedError, RuntimeError):  # there is none, or another one
        return "this torch has no such products"
    theirs = rows @ matrix.t(), grad @ matrix, grad.t() @ rows
    same = (torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(ours, theirs, strict=True))
    return None if all(same) else "its products are not those of MKL"


@cache
def choose(*, bf16: bool = False) -> list[str]:
    """What oneDNN computes faster here, `bf16` among it or not; nothing where it is unavailable. It
    is measured for a second the first time on a machine and kept for it, so that two starts
    agree."""
    if unavailable_reason():
        return []
    names = [n for kind, names in PRODUCTS.items() if bf16 or kind != "bf16" for n in names]
    facts = [torch.__version__, tuning_cache.processor(), *names, Path(__file__).read_text("utf-8")]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    return tuning_cache.names_kept(f"products-{digest}.json", lambda: _measure(names))


def _measure(names: list[str]) -> list[str]:
    """Which of these classes one thread computes faster with oneDNN."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more are disturbed by whatever else runs
    try:
        return _names(list(filter(_is_faster, names)))
    finally:
        torch.set_num_threads(threads)


def _is_faster(name: str) -> bool:
    """Whether oneDNN is, for each number of rows that is tried of this class."""
    kind, *shape = name.split(":")
    rows, width = shape[0] if len(shape) > 1 else kind, shape[-1] if shape else "narrow"
    return all(_wins(kind, number, width) for number in _ROWS[rows])


def _wins(kind: str, rows: int, width: str) -> bool:
    depth, height = _MATRICES[width]
    a, b, c = torch.ones(rows, depth), torch.ones(height, depth), torch.ones(rows, height)
    if kind == "backward":
        theirs, ours = lambda: [c @ b], lambda: [multiply(c, b.t())]
    elif kind == "weight":  # added to what there is, block by block, which MKL does in one
        d = torch.zeros_like(b)
        theirs, ours = lambda: [d.addmm_(c.t(), a)], lambda: [d.add_(outer(c, a))]
    elif kind == "bf16":
        matrix = b.bfloat16()
        theirs, ours = (
            lambda: [F.linear(rounded(a), b)],
            lambda: [F.linear(a.bfloat16(), matrix).float()],
        )
    else:
        matrix = pack(b) if kind == "packed" else b
        theirs, ours = lambda: [F.linear(a, b)], lambda: [multiply(a, matrix)]
    best = [math.inf, math.inf]
    for turn in range(1 + _MOST_TURNS):  # the first calls prepare
        seconds = [_seconds(work) for work in (theirs, ours)]
        best = list(map(min, best, seconds)) if turn else best
        ratio = best[0] / best[1] if turn else 1.0
        if turn >= _TURNS and not _UNCLEAR[0] < ratio < _UNCLEAR[1]:
            break
    return ratio > _MARGIN


def _seconds(work: Callable[[], object]) -> float:
    """Of this thread's processor time, which others on the machine do not lengthen."""
    start = time.thread_time()
    work()
    return time.thread_time() - start
