"""Fused attention on a GPU that also returns the log-sum-exp of the scores (the normalizer), so
that parts of an attention can be merged. There are two kinds of attention: over segments of packed
tokens (flash attention, Dao 2023), and over dense rows with a mask (memory-efficient attention,
Rabe and Staats 2021).

Both use private functions of torch, so each function is tested on the device before its first use.
If a function is missing or its results are wrong, its callers compute the attention without it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.kernels import torch_compat

HALF = (torch.float16, torch.bfloat16)
# Flash attention's largest head size, and the number of which a head size must be a multiple.
_LARGEST, _MULTIPLE = 256, 8
# The largest difference from the definition that counts as rounding; the trial's values are near 1.
_ROUNDING = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float32: 1e-3}
# The number of columns of a mask's row that the efficient kernel reads at a time.
_ALIGNED = 16


class Segments(NamedTuple):
    """The borders of segments: queries `edges_q[i]` to `edges_q[i + 1]` attend to keys `edges_k[i]`
    to `edges_k[i + 1]`. Edges are int32 (number of segments + 1,), on the device. `most_q` and
    `most_k` are the lengths of the longest segments. A segment may be empty."""

    edges_q: Tensor
    edges_k: Tensor
    most_q: int
    most_k: int


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scaling: float,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries (T, H, D) to keys (S, H_kv, D), of one 16-bit dtype, without gradients.
    Returns the output (T, H, D) and the normalizers (H, T) in float32. With `used`, int32 (number
    of segments,), queries attend only to a segment's first `used` keys. The shapes of tensors then
    stay the same while lengths change."""
    output, normalizer, *_ = _attend(query, key, value, segments, scaling, seqused_k=used)
    return output, normalizer


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float,
    causal: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return the results of `attend_segments` and the state that the backward needs."""
    edges_q, edges_k, most_q, most_k = segments
    if most_q == 1 and len(query) != len(edges_q) - 1:
        most_q = 2  # with 1, the kernel reads a query even from an empty segment
    edges = edges_q, edges_k, most_q, most_k
    found = torch_compat.flash_forward(
        query, key, value, *edges, 0.0, causal, False, scale=scaling, **options
    )
    return tuple(found[:4])


class GPUAttentionRanges(NamedTuple):
    """The two parts of a packed row's attention. `own`: causal self-attention of all tokens.
    `shared`: attention of the tokens `queries` (T',) to the tokens `keys` (S',), or None."""

    own: Segments
    shared: Segments | None
    queries: Tensor
    keys: Tensor


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, calls: GPUAttentionRanges, *, scaling: float
) -> Tensor:
    """Attention with gradients: maps query (T, H, D), key and value (T, H_kv, D), all of one 16-bit
    dtype, to the output (T, H, D). See `rloo.model.flash_cpu`, which does the same on a CPU."""
    output: Tensor = _Packed.apply(*map(Tensor.contiguous, (query, key, value)), calls, scaling)
    return output


class _Packed(torch.autograd.Function):
    """Two flash calls merged by their normalizers. Given the merged normalizers and the merged
    output, the backward of each call is exact."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: GPUAttentionRanges,
        scaling: float,
    ) -> Tensor:
        output, normalizer, *state = _attend(query, key, value, calls.own, scaling, True)
        if calls.shared is not None:
            here, there = calls.queries, calls.keys
            parts = query[here], key[there], value[there]
            part, more, *_ = _attend(*parts, calls.shared, scaling)
            before = normalizer.index_select(1, here)
            difference = more - before
            share = difference.sigmoid().t()[..., None]
            merged = output[here].to(share.dtype).lerp(part.to(share.dtype), share)
            output = output.index_copy(0, here, merged.to(output.dtype))
            normalizer = normalizer.index_copy(1, here, before + F.softplus(difference))
        ctx.save_for_backward(query, key, value, output, normalizer, *state)
        ctx.calls, ctx.scaling = calls, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, normalizer, *state = ctx.saved_tensors
        calls, gradient = ctx.calls, gradients[0].contiguous()

        def differentiate(parts: tuple[Tensor, ...], segments: Segments, causal: bool) -> Any:
            return torch_compat.flash_backward(
                *parts, *segments, 0.0, causal, *state, scale=ctx.scaling
            )

        whole = gradient, query, key, value, output, normalizer
        results = differentiate(whole, calls.own, True)
        if calls.shared is not None:
            here, there = calls.queries, calls.keys
            some = gradient[here], query[here], key[there], value[there], output[here]
            parts = differentiate((*some, normalizer.index_select(1, here)), calls.shared, False)
            for result, part, place in zip(results, parts, (here, there, there), strict=True):
                result.index_add_(0, place, part)
        return *results, None, None


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, Q, D) to keys (B, H, L, D), without gradients. Returns the output
    (B, H, Q, D) and the normalizers (B, H, Q, 1) in float32. The mask, broadcastable to (B, H, Q,
    L), is added to the scores."""
    shape = *query.shape[:3], key.shape[2]
    if mask is not None:
        padded = F.pad(mask.to(query.dtype), (0, -shape[-1] % _ALIGNED))
        mask = padded[..., : shape[-1]].expand(shape)
    output, normalizer, *_ = torch_compat.efficient_attention(
        query, key, value, mask, True, scale=scaling
    )
    return output, normalizer[:, :, : shape[2], None]


@cache
def has_segments(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether attention over segments, and its gradients, work on this device for heads of this
    size. False on a CPU."""
    fits = dtype in HALF and size % _MULTIPLE == 0 and size <= _LARGEST
    known = torch_compat.flash_forward is not None and torch_compat.flash_backward is not None
    if device.type != "cuda" or not fits or not known:
        return False
    return _agrees(_try_segments, device, dtype, size)


@cache
def has_dense(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether `attend_dense` works on this device for heads of this size. False on a CPU."""
    fits = dtype in _ROUNDING and size % _MULTIPLE == 0
    if device.type != "cuda" or not fits or torch_compat.efficient_attention is None:
        return False
    return _agrees(_try_dense, device, dtype, size)


def _agrees(trial: Any, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether a trial's results match the definition. The trial may run inside a checkpointed or
    offloaded layer, whose hooks must not see the tensors that the trial saves."""
    own = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
            own,
        ):
            pairs = trial(device, dtype, size)
            return all(
                float((found.float() - right).abs().max()) <= _ROUNDING[dtype]
                for found, right in pairs
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):  # the kernel is missing or takes other arguments
        return False


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _numbers(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attention of (T, H, D) to (S, H_kv, D) in float32, scaled by 0.25; mask (T, S) is added."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", query.float(), key) * 0.25 + mask
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value), scores.logsumexp(-1)


def _try_segments(
    device: torch.device, dtype: torch.dtype, size: int
) -> list[tuple[Tensor, Tensor]]:
    """Results and expected values of two cases: a prompt of 3 tokens with completions of 2 and 1
    tokens, with gradients; and one query that attends to the first 3 of 6 keys."""
    query, key, value = (
        _numbers((6, heads, size), n, device, dtype).requires_grad_()
        for n, heads in enumerate((4, 2, 2))
    )

    def edges(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    own = Segments(edges(0, 3, 5, 6), edges(0, 3, 5, 6), 3, 3)
    places = torch.arange(6, device=device)
    calls = GPUAttentionRanges(
        own, Segments(edges(0, 3), edges(0, 3), 3, 3), places[3:], places[:3]
    )
    span = torch.tensor([0, 0, 0, 1, 1, 2], device=device)
    visible = (span == span[:, None]) | (span == 0)
    visible &= places <= places[:, None]
    mask = torch.zeros(6, 6, device=device).masked_fill_(~visible, float("-inf"))
    found = attend_packed(query, key, value, calls, scaling=0.25)
    right = _by_definition(query, key, value, mask)[0]
    weights = _numbers((6, 4, size), 3, device, dtype)
    gradients = zip(
        torch.autograd.grad(found, (query, key, value), weights),
        torch.autograd.grad(right, (query, key, value), weights.float()),
        strict=True,
    )
    query, key, value = (x.detach() for x in (query, key, value))
    one = Segments(edges(0, 1), edges(0, 6), 1, 6)
    output, normalizer = attend_segments(query[:1], key, value, one, scaling=0.25, used=edges(3))
    seen = torch.zeros(1, 3, device=device)
    expected = _by_definition(query[:1], key[:3], value[:3], seen)
    some = (output, expected[0]), (normalizer, expected[1])
    return [(found.detach(), right.detach()), *((a, b.float()) for a, b in gradients), *some]


def _try_dense(device: torch.device, dtype: torch.dtype, size: int) -> list[tuple[Tensor, Tensor]]:
    """Results and expected values for two queries on 5 keys, with and without a mask."""
    query, key, value = (
        _numbers((length, 2, size), n, device, dtype) for n, length in enumerate((2, 5, 5))
    )
    mask = torch.zeros(2, 5, device=device)
    mask[1, :2] = float("-inf")
    pairs: list[tuple[Tensor, Tensor]] = []
    for added in (None, mask):
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        output, normalizer = attend_dense(q, k, v, added, 0.25)
        plain = torch.zeros_like(mask) if added is None else added
        expected = _by_definition(query, key, value, plain)
        pairs += [(output[0].transpose(0, 1), expected[0]), (normalizer[0, :, :, 0], expected[1])]
    return pairs
