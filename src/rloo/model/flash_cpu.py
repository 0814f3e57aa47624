"""Exact attention over packed groups without masks or padding, by torch's flash attention.

A completion's token attends to its prompt and to earlier tokens of the completion. One rectangular
call covers the prompt for all completions of a group. One causal call per completion covers the
rest. Both read the packed row in place. Each call also returns the log-sum-exp of its scores (the
normalizer). The two outputs are merged with these normalizers as weights (as in ring attention, Liu
et al. 2023). Given the merged output and normalizer, each part's backward is exact. Memory is
linear in the number of tokens. This module is for CPUs only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rloo.kernels import cpu_attention
from rloo.kernels.cpu_attention import SpanTable
from rloo.kernels.fused_layers import computes
from rloo.kernels.torch_compat import cpu_flash, cpu_flash_backward


@dataclass(frozen=True)
class CPUAttentionRanges:
    """Token ranges of the packed row. The tokens of each range in `own` have causal self-attention;
    these ranges cover the row once. Each pair in `shared` is a range of queries and a range of
    keys: all these queries also attend to all these keys."""

    own: Sequence[slice]
    shared: Sequence[tuple[slice, slice]]

    @cached_property
    def table(self) -> SpanTable | None:
        """The same ranges for the C kernels; None if a group does not start with its prompt."""
        groups: dict[int, list[tuple[int, int, int, int]]] = {}
        starts = [queries.start for queries, _ in self.shared]
        for own in self.own:
            prompt = slice(own.start, own.start)
            if (number := bisect_right(starts, own.start) - 1) >= 0:
                queries, keys = self.shared[number]
                prompt = keys if own.stop <= queries.stop else prompt
            spans = groups.setdefault(prompt.start, [])
            spans.append((own.start, own.stop, prompt.start, prompt.stop))
            prompt_first = spans[0] == (prompt.start, prompt.stop, prompt.start, prompt.start)
            if prompt.start < prompt.stop and not prompt_first:
                return None
        table = [span for spans in groups.values() for span in spans]
        offsets = torch.tensor([0, *(len(spans) for spans in groups.values())]).cumsum(0)
        longest = max(stop - start + end - begin for start, stop, begin, end in table)
        return SpanTable(torch.tensor(table), offsets, longest)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, calls: CPUAttentionRanges, *, scaling: float
) -> Tensor:
    """Map query (H, T, D), key and value (H_kv, T, D), all of one dtype, to the output (T, H, D).

    `scaling` multiplies the scores.
    """
    states = (query, key, value)
    if computes(*states) and calls.table is not None and len({x.shape[-1] for x in states}) == 1:
        by_token = (x.transpose(0, 1) for x in states)
        result: Tensor = _PackedKernel.apply(*by_token, calls.table, scaling)
        return result
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


class _PackedKernel(torch.autograd.Function):
    """Attention by the C kernels: query (T, H, D), key and value (T, H_kv, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, table: SpanTable, scaling: float
    ) -> Tensor:
        states = query.contiguous(), key.contiguous(), value.contiguous()
        output, normalizer = cpu_attention.attend(*states, table, scaling)
        ctx.save_for_backward(*states, output, normalizer)
        ctx.table, ctx.scaling = table, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        gradients = cpu_attention.attend_backward(grad.contiguous(), kept, ctx.table, ctx.scaling)
        return *gradients, None, None


class _PackedFlash(torch.autograd.Function):
    """Attention by torch's CPU kernel. Tensors are (G, R, T, D): G groups of R heads share keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: CPUAttentionRanges,
        scaling: float,
    ) -> Tensor:
        precise = torch.promote_types(query.dtype, torch.float32)
        output = _empty_by_token(query, precise)
        normalizer = query.new_empty(query.shape[:3], dtype=precise)
        for tokens in calls.own:
            states = (x[:, :, tokens] for x in (query, key, value))
            output[:, :, tokens], normalizer[:, :, tokens] = cpu_flash(
                *states, is_causal=True, scale=scaling
            )
        for queries, keys in calls.shared:
            part, more = cpu_flash(
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
        results = [_empty_by_token(x, x.dtype) for x in states[1:4]]

        def differentiate(queries: slice, keys: slice, causal: bool) -> Any:
            places = queries, queries, keys, keys, queries, queries
            parts = (x[:, :, place] for x, place in zip(states, places, strict=True))
            return cpu_flash_backward(*parts, 0.0, causal, scale=ctx.scaling)

        for tokens in ctx.calls.own:
            for result, part in zip(results, differentiate(tokens, tokens, True), strict=True):
                result[:, :, tokens] = part
        for queries, keys in ctx.calls.shared:
            parts = differentiate(queries, keys, False)
            for result, part, place in zip(results, parts, (queries, keys, keys), strict=True):
                result[:, :, place] += part
        return *results, None, None


def _empty_by_token(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor (G, R, T, D) whose memory has the order (T, G, R, D), as the next layer reads
    it."""
    groups, repeats, tokens, size = like.shape
    return like.new_empty(tokens, groups, repeats, size, dtype=dtype).permute(1, 2, 0, 3)
