"""Exact attention over packed groups by the C kernels: see attend.c."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rloo.kernels.ffi import AttentionShape, call


class SpanTable(NamedTuple):
    """The spans of a packed row of tokens. `spans`, int64 (S, 4), has the start and stop of each
    span, then the start and stop of the prompt to which all tokens of the span also attend (equal
    numbers if there is no prompt). `offsets` (G + 1,) delimit the spans of each group. A group's
    first span is its prompt. `longest` is the largest number of keys to which a query attends."""

    spans: Tensor
    offsets: Tensor
    longest: int


def attend(
    query: Tensor, key: Tensor, value: Tensor, table: SpanTable, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attention of query (T, H, D) to key and value (T, H_kv, D): the output (T, H, D), and the
    log-sum-exp (T, H) of each query's scores. `scaling` multiplies the scores."""
    shapes = _shapes(query, key, table, scaling)
    output, normalizer = torch.empty_like(query), query.new_empty(query.shape[:2])
    room = _room(query, table, backward=False)
    outputs = (output, normalizer, table.offsets, table.spans, room)
    call("attend", query, key, value, *outputs, shapes)
    return output, normalizer


def attend_backward(
    grad: Tensor,
    kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    table: SpanTable,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. `kept` are query, key, value and both outputs of
    `attend`."""
    query, key, _, _, _ = kept
    shapes = _shapes(query, key, table, scaling)
    gradients = [torch.empty_like(query) for _ in range(3)]
    room = _room(query, table, backward=True)
    call("attend_backward", grad, *kept, *gradients, table.offsets, table.spans, room, shapes)
    of_query, of_key, of_value = gradients
    if query.shape[1] > key.shape[1]:
        of_key, of_value = (_summed(each, key, shapes) for each in (of_key, of_value))
    return of_query, of_key, of_value


def _summed(each: Tensor, like: Tensor, shapes: AttentionShape) -> Tensor:
    total = torch.empty_like(like)
    call("sum_heads", each, total, shapes)
    return total


def _shapes(query: Tensor, key: Tensor, table: SpanTable, scaling: float) -> AttentionShape:
    tokens, heads, size = query.shape
    groups = len(table.offsets) - 1
    return AttentionShape(tokens, heads, key.shape[1], size, groups, table.longest, scaling)


def _room(query: Tensor, table: SpanTable, *, backward: bool) -> Tensor:
    each = call("attend_room", table.longest, query.shape[-1], int(backward))
    return query.new_empty(torch.get_num_threads(), each)
