"""The C kernels of the update, on dense float32 CPU tensors: functions and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rloo.kernels.ffi import HeadShape, call

# Rows per partial sum of a weight's gradient (PART in update.c).
_PART = 64
# Elements per partial sum of squares (SQUARES in update.c).
_SQUARES = 1 << 16


def _parts(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(-(-rows // _PART), like.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """weight * x / sqrt(mean(x^2) + epsilon) for rows (..., D), and the state for the backward."""
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1])
    call("rms_norm", x, weight, y, inverse, inverse.numel(), x.shape[-1], epsilon)
    return y, inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    of_x, of_weight = torch.empty_like(x), torch.empty_like(weight)
    rows, width = inverse.numel(), x.shape[-1]
    parts = _parts(x, rows)
    call("rms_norm_backward", grad, x, weight, inverse, of_x, of_weight, parts, rows, width)
    return of_x, of_weight


def sum_of_squares(x: Tensor) -> float:
    """The sum of squares of all elements, in float64."""
    sums = torch.empty(-(-x.numel() // _SQUARES), dtype=torch.float64)
    call("sum_of_squares", x, sums, x.numel())
    return float(sums.sum())


def rounded(x: Tensor, place: Tensor | None = None) -> Tensor:
    """Round x to bfloat16 values, ties to even, into `place` (which may be x) or new memory."""
    y = torch.empty_like(x) if place is None else place
    call("round_to_bfloat16", x, y, x.numel())
    return y


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up."""
    y = torch.empty_like(gate)
    call("gated_unit", gate, up, y, y.numel())
    return y


def gated_unit_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    call("gated_unit_backward", grad, gate, up, of_gate, of_up, grad.numel())
    return of_gate, of_up


def _heads(x: Tensor, cosine: Tensor, epsilon: float) -> HeadShape:
    heads, size = x.shape[-2:]
    tokens, period = x.numel() // max(1, heads * size), cosine.numel() // size
    return HeadShape(tokens, heads, size, period, epsilon)


def rotary(
    x: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, epsilon: float
) -> tuple[Tensor, Tensor | None]:
    """Rotate heads (B, T, H, D) by cosine and sine (B or 1, T, D). If there is a weight (D,),
    `rms_norm` is applied first. Also returns the state for the backward."""
    y, inverse = torch.empty_like(x), None if weight is None else x.new_empty(x.shape[:-1])
    call("rotary", x, weight, cosine, sine, y, inverse, _heads(x, cosine, epsilon))
    return y, inverse


def rotary_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    inverse: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and of the weight."""
    of_x, of_weight, parts = torch.empty_like(grad), None, None
    if weight is not None:
        of_weight = torch.empty_like(weight)
        parts = _parts(grad, grad.shape[:-2].numel())
    given = (grad, x, weight, cosine, sine, inverse)
    call("rotary_backward", *given, of_x, of_weight, parts, _heads(grad, cosine, 0.0))
    return of_x, of_weight


def log_softmax(
    logits: Tensor, targets: Tensor, temperature: float, places: Sequence[Tensor | None]
) -> None:
    """Fill `places` from logits (R, V) and targets (R,): see `fused_softmax.select`. The four
    outputs are exp(logits / temperature - the row's maximum), log-probs, entropies, and the sum of
    each row of the first output."""
    call("log_softmax", logits, targets, *places, *logits.shape, temperature)


def log_softmax_backward(kept: Tensor, total: Tensor, targets: Tensor, scale: Tensor) -> None:
    """Overwrite `kept`, the first output of `log_softmax`, with the gradient of the logits. `scale`
    (R,) is the gradient of the log-probs, already divided by the temperature."""
    call("log_softmax_backward", kept, total, targets, scale, *kept.shape)
