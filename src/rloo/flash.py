"""Exact attention over packed groups without masks, rows or padding: parts of a softmax, merged.

A completion's token sees its prompt and its own past. The prompt's part is one rectangular call for
all completions of a group, the own part one causal call for each completion; both read the packed
row in place. Each call returns the log of its softmax's normalizer, by which the parts are weighted
(as in ring attention, Liu et al. 2023); with the merged output and normalizer the backward of each
part is exact. Memory is linear in the tokens. Uses torch's flash attention for CPUs. Knows nothing
of samples or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Queries, keys (slices of the packed row), whether the queries are the keys' own tokens.
Call = tuple[slice, slice, bool]


class PackedFlash(torch.autograd.Function):
    """query (T, H, D), key and value (T, H_kv, D), of one dtype, to (T, H, D).

    `calls` covers each query by one call or two, those of one kind without overlap: the second is
    merged into the first. `scaling` multiplies the scores.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Sequence[Call],
        shared: Sequence[Call],
        scaling: float,
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        output = torch.empty_like(query, dtype=precise)
        normalizer = query.new_empty(query.shape[:2], dtype=precise)
        for queries, keys, causal in own:
            output[queries], normalizer[queries] = _attend(
                query[queries], key[keys], value[keys], causal, scaling
            )
        for queries, keys, causal in shared:
            part, more = _attend(query[queries], key[keys], value[keys], causal, scaling)
            difference = more - normalizer[queries]
            output[queries] = output[queries].lerp(
                part.to(precise), difference.sigmoid()[..., None]
            )
            normalizer[queries] += torch.nn.functional.softplus(difference)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizer)
        ctx.calls = (*own, *shared)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, output, normalizer = ctx.saved_tensors
        grad_query, grad_key, grad_value = (torch.zeros_like(x) for x in (query, key, value))
        for queries, keys, causal in ctx.calls:
            parts = _backward(
                gradients[0][queries],
                query[queries],
                key[keys],
                value[keys],
                output[queries],
                normalizer[queries],
                causal,
                ctx.scaling,
            )
            grad_query[queries] += parts[0]
            grad_key[keys] += parts[1]
            grad_value[keys] += parts[2]
        return grad_query, grad_key, grad_value, None, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """(Q, H, D) and (L, H_kv, D) to the output (Q, H, D) and its normalizer (Q, H)."""
    groups = key.shape[1]
    output, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _by_group(query, groups),
        _repeat(key, query),
        _repeat(value, query),
        is_causal=causal,
        scale=scaling,
    )
    return _by_token(output), normalizer.flatten(0, 1).t()


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizer: Tensor,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = key.shape[1]
    by_query, by_key, by_value = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _by_group(gradient, groups),
            _by_group(query, groups),
            _repeat(key, query),
            _repeat(value, query),
            _by_group(output, groups),
            normalizer.t().unflatten(0, (groups, -1)),
            0.0,
            causal,
            scale=scaling,
        )
    )
    return (
        _by_token(by_query),
        by_key.sum(dim=1).transpose(0, 1),
        by_value.sum(dim=1).transpose(0, 1),
    )


def _by_group(states: Tensor, groups: int) -> Tensor:
    """(Q, H, D) to (H_kv, H / H_kv, Q, D): heads that share keys are one batch entry's heads."""
    return states.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _by_token(states: Tensor) -> Tensor:
    return states.permute(2, 0, 1, 3).flatten(1, 2)


def _repeat(states: Tensor, query: Tensor) -> Tensor:
    """(L, H_kv, D) to (H_kv, H / H_kv, L, D) without a copy."""
    repeats = query.shape[1] // states.shape[1]
    return states.transpose(0, 1)[:, None].expand(-1, repeats, -1, -1)
