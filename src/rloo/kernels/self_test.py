"""Compares the C kernels with torch on small inputs, at the start of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.kernels import cpu_attention, decode, ops

# Widths that fill some SIMD vectors and leave a remainder.
_ROWS, _WIDTH, _SIZE = 70, 83, 24
_TOLERANCE = 1e-4

Pairs = Iterator[tuple[Tensor | None, Tensor | None]]


@cache
@torch.enable_grad()
def difference() -> str | None:
    """A text that names the first function of the library whose results differ from torch's, or
    None if there is no such function. Takes milliseconds."""
    for name, check in _CHECKS.items():
        if not all(_are_close(ours, theirs) for ours, theirs in check(_random())):
            return f"its {name} differs from torch's"
    return None


def _random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32)


def _are_close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    assert ours is not None and theirs is not None
    theirs = theirs.detach().to(ours.dtype)
    atol = _TOLERANCE * float(theirs.abs().max())
    return torch.allclose(ours, theirs, rtol=0, atol=atol)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    """Copies in float64 that require gradients."""
    return [x.double().requires_grad_() for x in tensors]


def _normal(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _norm(random: Callable[..., Tensor]) -> Pairs:
    x, weight, grad = random(_ROWS, _WIDTH), random(_WIDTH), random(_ROWS, _WIDTH)
    y, inverse = ops.rms_norm(x, weight, 1e-3)
    leaves = _leaves(x, weight)
    theirs = _normal(leaves[0], leaves[1], 1e-3)
    theirs.backward(grad.double())
    yield y, theirs
    ours = ops.rms_norm_backward(grad, x, weight, inverse)
    yield from zip(ours, (leaf.grad for leaf in leaves), strict=True)


def _gate(random: Callable[..., Tensor]) -> Pairs:
    gate, up, grad = (3 * random(_ROWS, _WIDTH) for _ in range(3))
    leaves = _leaves(gate, up)
    theirs = F.silu(leaves[0]) * leaves[1]
    theirs.backward(grad.double())
    yield ops.gated_unit(gate, up), theirs
    ours = ops.gated_unit_backward(grad, gate, up)
    yield from zip(ours, (leaf.grad for leaf in leaves), strict=True)


def _rotary(random: Callable[..., Tensor]) -> Pairs:
    x, weight, grad = random(2, _ROWS, 3, _SIZE), random(_SIZE), random(2, _ROWS, 3, _SIZE)
    turns = random(1, _ROWS, _SIZE), random(1, _ROWS, _SIZE)
    leaves = _leaves(x, weight)
    cosine, sine = (turn.double()[:, :, None] for turn in turns)
    normal = _normal(leaves[0], leaves[1], 1e-3)
    one, other = normal.chunk(2, dim=-1)
    theirs = normal * cosine + torch.cat((-other, one), dim=-1) * sine
    theirs.backward(grad.double())
    y, inverse = ops.rotary(x, weight, *turns, 1e-3)
    yield y, theirs
    ours = ops.rotary_backward(grad, x, weight, *turns, inverse)
    yield from zip(ours, (leaf.grad for leaf in leaves), strict=True)


def _softmax(random: Callable[..., Tensor]) -> Pairs:
    logits, scale = 5 * random(_ROWS, _WIDTH), random(_ROWS)
    targets = torch.arange(_ROWS) % _WIDTH
    (leaf,) = _leaves(logits)
    theirs = (leaf / 0.7).log_softmax(-1)
    chosen = theirs.gather(-1, targets[:, None])[:, 0]
    chosen.backward(scale.double())
    kept, logprobs, entropy, total = logits.clone(), *(torch.empty(_ROWS) for _ in range(3))
    ops.log_softmax(kept, targets, 0.7, (kept, logprobs, entropy, total))
    yield logprobs, chosen
    yield entropy, -(theirs.exp() * theirs).sum(-1)
    ops.log_softmax_backward(kept, total, targets, scale / 0.7)
    yield kept, leaf.grad


def _attention(random: Callable[..., Tensor]) -> Pairs:
    """Attention over a prompt of 9 tokens with completions of 20 and 5 tokens."""
    tokens, heads, scaling = 34, 4, _SIZE**-0.5
    query, key, value, grad = (random(tokens, n, _SIZE) for n in (heads, 2, 2, heads))
    spans = torch.tensor([(0, 9, 0, 0), (9, 29, 0, 9), (29, 34, 0, 9)])
    table = cpu_attention.SpanTable(spans, torch.tensor([0, 3]), 29)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, stop, first, last in spans.tolist():
        seen[start:stop, start:stop] = True
        seen[start:stop, first:last] = True
    leaves = _leaves(query, key, value)
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in leaves)
    scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~seen.tril(), -torch.inf)
    theirs = (scores.softmax(-1) @ v).transpose(0, 1)
    theirs.backward(grad.double())
    output, normalizer = cpu_attention.attend(query, key, value, table, scaling)
    yield output, theirs
    kept = (query, key, value, output, normalizer)
    ours = cpu_attention.attend_backward(grad, kept, table, scaling)
    yield from zip(ours, (leaf.grad for leaf in leaves), strict=True)


def _squares(random: Callable[..., Tensor]) -> Pairs:
    x = random(_ROWS, _WIDTH)
    yield torch.tensor(ops.sum_of_squares(x)), x.double().square().sum()


def _rounding(random: Callable[..., Tensor]) -> Pairs:
    x = random(_ROWS, _WIDTH)
    yield ops.rounded(x), x.bfloat16()


def _product(random: Callable[..., Tensor]) -> Pairs:
    step = decode.columns()
    x, weight, bias = random(_ROWS, _WIDTH), random(2 * step, _WIDTH), random(2 * step)
    for matrix in (weight, weight.bfloat16()):
        theirs = F.linear(x.double(), matrix.double(), bias.double())
        yield decode.PackedMatrix(matrix, bias).times(x), theirs
        gate, up = theirs.chunk(2, dim=-1)
        yield decode.PackedMatrix(matrix, bias, gated=True).gated(x), F.silu(gate) * up


_CHECKS: dict[str, Callable[[Callable[..., Tensor]], Pairs]] = {
    "norm": _norm,
    "gated unit": _gate,
    "rotary embedding": _rotary,
    "softmax": _softmax,
    "attention": _attention,
    "sum of squares": _squares,
    "rounding": _rounding,
    "product": _product,
}
