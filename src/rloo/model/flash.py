"""Exact attention over packed groups without masks, rows or padding, by torch's flash attention.

A completion's token sees its prompt and its own past. The prompt's part is one rectangular call for
all completions of a group, the completion's own part one causal call per completion; both read the
packed row in place. Each call returns the log of its softmax's normalizer, by which the two parts
are weighted (as in ring attention, Liu et al. 2023). Given the merged output and normalizer, the
backward of each part is exact. Memory is linear in the tokens. For CPUs only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Ranges of the packed row: of tokens that see themselves, and of queries with the keys they share.
Calls = tuple[Sequence[slice], Sequence[tuple[slice, slice]]]

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, calls: Calls, *, scaling: float
) -> Tensor:
    """Attention: query (H, T, D), key and value (H_kv, T, D), of one dtype, to (T, H, D).

    The first of the `calls` are causal, of tokens on themselves, and cover the row once; the others
    are further keys, all of which some of the queries see. `scaling` multiplies the scores.
    """
    groups = key.shape[0]
    repeats = query.shape[0] // groups
    output = _PackedFlash.apply(
        query.unflatten(0, (groups, repeats)),
        key[:, None].expand(-1, repeats, -1, -1),
        value[:, None].expand(-1, repeats, -1, -1),
        calls,
        scaling,
    )
    return output.permute(2, 0, 1, 3).flatten(1, 2)


class _PackedFlash(torch.autograd.Function):
    """All arguments are (G, R, T, D): G groups of R heads that share keys."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Calls, scaling: float
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        output = _empty_by_token(query, precise)
        normalizer = query.new_empty(query.shape[:3], dtype=precise)
        own, shared = calls
        for tokens in own:
            states = (x[:, :, tokens] for x in (query, key, value))
            output[:, :, tokens], normalizer[:, :, tokens] = _attend(
                *states, is_causal=True, scale=scaling
            )
        for queries, keys in shared:
            part, more = _attend(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], scale=scaling
            )
            difference = more - normalizer[:, :, queries]
            share = difference.sigmoid()[..., None]
            output[:, :, queries] = output[:, :, queries].lerp(part.to(precise), share)
            normalizer[:, :, queries] += F.softplus(difference)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizer)
        ctx.calls, ctx.scaling = calls, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        states = gradients[0], *ctx.saved_tensors
        own, shared = ctx.calls
        results = [_empty_by_token(x, x.dtype) for x in states[1:4]]

        def differentiate(queries: slice, keys: slice, causal: bool) -> Any:
            places = queries, queries, keys, keys, queries, queries
            parts = (x[:, :, place] for x, place in zip(states, places, strict=True))
            return _differentiate(*parts, 0.0, causal, scale=ctx.scaling)

        for tokens in own:
            for result, part in zip(results, differentiate(tokens, tokens, True), strict=True):
                result[:, :, tokens] = part
        for queries, keys in shared:
            parts = differentiate(queries, keys, False)
            for result, part, place in zip(results, parts, (queries, keys, keys), strict=True):
                result[:, :, place] += part
        return *results, None, None


def _empty_by_token(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty (G, R, T, D) whose memory is ordered (T, G, R, D), as the next layer reads it."""
    groups, repeats, tokens, size = like.shape
    return like.new_empty(tokens, groups, repeats, size, dtype=dtype).permute(1, 2, 0, 3)
