"""Norms, rotary embeddings and gated units on a GPU. torch.compile compiles the definition of each
operation to one kernel. Without these kernels torch reads and writes each array several times
between products (see `rloo.kernels.fused_layers`, and `rloo.kernels` for a CPU).

With 16-bit inputs the kernels compute in float32 and round once. If the compiler is missing or its
results are wrong, eager torch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rloo.kernels import torch_compat

_KINDS = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, nn.Parameter)
# The rows of a trial, and the largest difference that counts as rounding, for values near 1.
_ROWS = 48
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}

_in_use = False


def use(wanted: bool) -> None:
    """Select compiled functions (True) or eager torch (False) for this process from now on."""
    global _in_use
    _in_use = wanted


def in_use() -> bool:
    """Whether compiled functions are in use on GPUs."""
    return _in_use


def computes(*tensors: Tensor) -> bool:
    """Whether to use compiled functions for these tensors. Torch computes for subclasses of
    Tensor."""
    return _in_use and all(
        type(x) in _PLAIN and x.dtype in _KINDS and x.device.type == "cuda" for x in tensors
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean of x^2 + epsilon) * weight for x (..., D), in the dtype in which a matrix
    product reads its input (autocast's dtype if enabled)."""
    rows, how = x.reshape(-1, x.shape[-1]), (epsilon, _dtype_of(x, weight))
    result: Tensor = _Fused.apply(_rms_norm, _rms_norm_backward, how, rows, weight)
    return result.view(x.shape)


def rotary(
    x: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, epsilon: float
) -> Tensor:
    """Rotate heads (B, T, H, D) by cosine and sine (B, T, D) or (1, T, D). If there is a weight
    (D,), the heads are normalized first."""
    batch, length, *rest = x.shape
    turns = (y.expand(batch, -1, -1).reshape(batch * length, -1) for y in (cosine, sine))
    heads = x.reshape(batch * length, *rest)
    how = epsilon, _dtype_of(x) if weight is None else _dtype_of(x, weight)
    result: Tensor = _Fused.apply(_rotary, _rotary_backward, how, heads, weight, *turns)
    return result.view(x.shape)


def gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, for gate and up (..., D)."""
    rows = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    result: Tensor = _Fused.apply(_gated_unit, _gated_unit_backward, (), *rows)
    return result.view(gate.shape)


def logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs (R,) of targets (R,) under softmax(logits (R, V) / temperature), and entropies
    (R,), in float32. The logits are saved for the backward in their dtype."""
    found: tuple[Tensor, Tensor] = _LogProbs.apply(logits, targets, temperature)
    return found


def collisions(logits: Tensor, temperature: float) -> Tensor:
    """The sums of the squared probabilities of softmax(logits (R, V) / temperature), (R,), in
    float32. A separate kernel, which reads the logits once more."""
    found: Tensor = _run(_collisions, (logits,), (temperature,), rank=1)
    return found


def merge(output: Tensor, normalizer: Tensor, part: Tensor, more: Tensor) -> Tensor:
    """Merge two parts of an attention, over different keys. `output` and `part` (T, H, D) are the
    parts' outputs, `normalizer` and `more` (H, T) the log-sum-exps of their scores."""
    torch_compat.mark_varying(normalizer, 1)
    torch_compat.mark_varying(more, 1)
    let_vary(output, part)
    merged: Tensor = _compiled(_merge)(output, normalizer, part, more)
    return merged


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled at its first call, once for all sizes that are marked as
    dynamic. A method is compiled once for all objects of its class."""
    if (owner := getattr(function, "__self__", None)) is not None:
        return partial(_compiled(function.__func__), owner)  # type: ignore[attr-defined]
    return _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compile(function)
    return result


def let_vary(*tensors: Tensor) -> None:
    """Mark the number of rows of these tensors as dynamic for torch.compile."""
    for tensor in tensors:
        torch_compat.mark_varying(tensor, 0)


def _run(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], how: Any, *, rank: int = 2
) -> Any:
    """Call the compiled function. In tensors of `rank` dimensions or more, the number of rows may
    vary. Gradients and autocast are disabled, since torch.compile recompiles if either changes."""
    given = [None if x is None else x.detach() for x in tensors]
    for x in given:
        if x is not None and x.ndim >= rank:
            torch_compat.mark_varying(x, *range(max(1, x.ndim - 1)))
    off = torch.autocast("cuda", torch.bfloat16, enabled=False, cache_enabled=True)
    with torch.no_grad(), off:
        return _compiled(function)(*given, *how)


class _Fused(torch.autograd.Function):
    """A compiled forward and a compiled backward. The backward gets the gradient and the inputs."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, backward: Any, how: tuple[Any, ...], *tensors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.how = backward, how
        result: Tensor = _run(function, tensors, how)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = _run(ctx.function, (gradient, *ctx.saved_tensors), ctx.how[:1])
        return None, None, None, *found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        found = _run(_logprobs, (logits, targets), (temperature,), rank=1)
        ctx.save_for_backward(logits, targets, *found[1:])
        ctx.temperature = temperature
        return found[0], found[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        tensors, how = (*ctx.saved_tensors, torch.stack(gradients, 1)), (ctx.temperature,)
        return _run(_logprobs_backward, tensors, how, rank=1), None, None


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    wide = x.float()
    return (wide * _inverse(wide, epsilon) * weight.float()).to(dtype)


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    wide, of_y = x.float(), gradient.float()
    inverse = _inverse(wide, epsilon)
    of_normal = of_y * weight.float()
    along = (of_normal * wide).mean(-1, keepdim=True)
    of_x = inverse * of_normal - wide * (inverse.pow(3) * along)
    of_weight = (of_y * wide * inverse).flatten(0, -2).sum(0)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def _inverse(wide: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def _rotary(
    x: Tensor,
    weight: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    epsilon: float,
    dtype: torch.dtype,
) -> Tensor:
    wide = x.float() if weight is None else _rms_norm(x, weight, epsilon, torch.float32)
    one, other = wide.chunk(2, dim=-1)
    turned = torch.cat((-other, one), dim=-1)
    return (wide * cosine.float()[:, None] + turned * sine.float()[:, None]).to(dtype)


def _rotary_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    epsilon: float,
) -> tuple[Tensor | None, ...]:
    of_y = gradient.float()
    one, other = (of_y * sine.float()[:, None]).chunk(2, dim=-1)
    back = of_y * cosine.float()[:, None] + torch.cat((other, -one), dim=-1)
    if weight is None:
        return back.to(x.dtype), None, None, None
    return *_rms_norm_backward(back, x, weight, epsilon), None, None


def _gated_unit(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def _gated_unit_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide, of_y = gate.float(), gradient.float()
    share = wide.sigmoid()
    of_gate = of_y * up.float() * share * (1 + wide * (1 - share))
    return of_gate.to(gate.dtype), (of_y * wide * share).to(up.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    # A logit of minus infinity has probability 0, and 0 * log 0 must be 0, not NaN.
    return (logits.float() / temperature).clamp(min=-1e30)


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    scaled = _scaled(logits, temperature)
    normalizer = scaled.logsumexp(-1)
    weights = (scaled - normalizer[:, None]).exp()
    chosen = scaled.gather(-1, targets[:, None])[:, 0]
    return chosen - normalizer, normalizer - (weights * scaled).sum(-1), normalizer


def _collisions(logits: Tensor, temperature: float) -> Tensor:
    return _scaled(logits, temperature).softmax(-1).square().sum(-1)


def _logprobs_backward(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    gradients: Tensor,
    temperature: float,
) -> Tensor:
    of_logprobs, of_entropy = gradients[:, :1], gradients[:, 1:]
    logs = _scaled(logits, temperature) - normalizer[:, None]
    weights = logs.exp()
    # dH/dz = -p (log p + H).
    through = weights * (of_logprobs + of_entropy * (logs + entropy[:, None]))
    chosen = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.where(chosen, of_logprobs, 0.0) - through
    return (gradient / temperature).to(logits.dtype)


def _merge(output: Tensor, normalizer: Tensor, part: Tensor, more: Tensor) -> Tensor:
    share = (more - normalizer).sigmoid().t()[..., None]
    return output.float().lerp(part.float(), share).to(output.dtype)


def _dtype_of(*tensors: Tensor) -> torch.dtype:
    """Autocast's dtype if enabled, else the tensors' promoted dtype."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


@cache
def unavailable_reason(
    device: torch.device, dtype: torch.dtype, width: int, size: int
) -> str | None:
    """Why compiled functions cannot be used on this device, for hidden states of `width` and heads
    of `size`, as the end of a sentence; None if they can. The check takes seconds."""
    try:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            worst = max(_differences(device, dtype, width, size))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail in any way; eager torch is the fallback
        return f"a trial of torch.compile failed: {type(error).__name__}: {error}".split("\n")[0]
    if not worst <= _ROUNDING[dtype]:
        return f"torch.compile gives other numbers (by {worst:.1e})"
    return None


def _differences(device: torch.device, dtype: torch.dtype, width: int, size: int) -> list[float]:
    """The largest differences of results and gradients from those of the definitions in eager
    torch."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, of).requires_grad_()

    turns = numbers(_ROWS, size).detach(), numbers(_ROWS, size).detach()
    targets = torch.arange(_ROWS, device=device) % width
    pair = numbers(_ROWS, width, of=dtype), numbers(_ROWS, width, of=dtype)
    parts = [(numbers(_ROWS, 4, size, of=dtype), numbers(4, _ROWS)) for _ in range(2)]
    cases: list[tuple[Any, Any, tuple[Tensor, ...]]] = [
        (
            lambda x, weight: rms_norm(x, weight, 1e-6),
            lambda x, weight: _rms_norm(x, weight, 1e-6, dtype),
            (numbers(_ROWS, width), numbers(width)),
        ),
        (
            lambda x, weight: rotary(x[None], weight, turns[0][None], turns[1][None], 1e-6)[0],
            lambda x, weight: _rotary(x, weight, *turns, 1e-6, dtype),
            (numbers(_ROWS, 4, size, of=dtype), numbers(size)),
        ),
        (gated_unit, _gated_unit, pair),
        (
            lambda x: torch.stack((*logprobs(x, targets, 0.7), collisions(x, 0.7))),
            lambda x: torch.stack((*_logprobs(x, targets, 0.7)[:2], _collisions(x.detach(), 0.7))),
            pair[:1],
        ),
    ]
    found = [
        _distance(merge(*(x.detach() for p in parts for x in p)), _merge(*parts[0], *parts[1]))
    ]
    for ours, definition, inputs in cases:
        one, other = ours(*inputs), definition(*inputs)
        weights = torch.randn(other.shape, generator=generator).to(device, other.dtype) / 8
        gradients = (torch.autograd.grad(x, inputs, weights) for x in (one, other))
        found.append(_distance(one, other))
        found += map(_distance, *gradients)
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).detach().abs().max())
