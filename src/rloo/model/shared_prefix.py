"""Attention over packed groups: each prompt once, followed by its K completions.

The packed row is `prompt, completion 1, completion 2, ..., next prompt, ...`. Only a model's
attention relates tokens to each other, so only the attention must know this layout. A prompt
attends to itself, a completion to its prompt and its earlier tokens. `flash_cpu.py` computes this
attention in place on a CPU, `flash_gpu.py` on a GPU in 16 bits. In all other cases, such as sliding
windows, soft caps and sinks, each prompt and completion is a padded row with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rloo.kernels import torch_compat
from rloo.model import flash_gpu
from rloo.model.attention import AttentionOptions, attend
from rloo.model.flash_cpu import CPUAttentionRanges, attend_packed
from rloo.model.offload import send

# The largest mask, in elements, that is stored. A larger one is replaced by masks for blocks of
# queries, which the backward recomputes. No array then grows with tokens squared.
MASK_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop` of the packed row; `prompt` is the index of a completion's
    prompt."""

    start: int
    stop: int
    prompt: int | None = None


class _Rows:
    """Spans of one attention call, padded to R rows of W tokens."""

    def __init__(self, spans: Sequence[Span], prompts: _Rows | None) -> None:
        lengths = torch.tensor([span.stop - span.start for span in spans])
        columns = torch.arange(int(lengths.max()))
        starts = torch.tensor([span.start for span in spans])
        self.valid = columns < lengths[:, None]
        self.index = torch.where(self.valid, starts[:, None] + columns, 0)
        self.prompt: Tensor | None = None
        # Positions of queries (R, W) and keys (R, L); the masks (R, W, L) are made when needed.
        self._position = columns.expand(len(spans), -1)
        self._key_position, self._key_valid = self._position, self.valid
        if prompts is not None:
            self.prompt = torch.tensor([span.prompt for span in spans])
            before = prompts.valid[self.prompt]
            self._position = self._position + before.sum(dim=1)[:, None]
            self._key_position = torch.cat(
                [torch.arange(before.shape[1]).expand(len(spans), -1), self._position], dim=1
            )
            self._key_valid = torch.cat([before, self.valid], dim=1)
        self._masks: dict[int | None, Tensor] = {}

    def to(self, device: torch.device) -> _Rows:
        for name in ("valid", "index", "prompt", "_position", "_key_position", "_key_valid"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, send(tensor, device))
        return self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention: query (R, H, W, D), key and value (R, H_kv, L, D) to (R, H, W, D)."""
        num_rows, width = self.valid.shape
        window = options.sliding_window
        block = max(1, MASK_ELEMENTS // (num_rows * key.shape[2]))
        if width <= block:
            if window not in self._masks:
                self._masks[window] = self._mask(window, slice(0, width), key.shape[2])
            return attend(query, key, value, self._masks[window], options)
        before = key.shape[2] - width

        def attend_block(queries: slice, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            last = before + queries.stop
            mask = self._mask(window, queries, last)
            return attend(query[:, :, queries], key[:, :, :last], value[:, :, :last], mask, options)

        attend_again = partial(
            checkpoint, attend_block, use_reentrant=False, preserve_rng_state=False
        )
        blocks = [slice(start, min(start + block, width)) for start in range(0, width, block)]
        return torch.cat([attend_again(queries, query, key, value) for queries in blocks], dim=2)

    def _mask(self, sliding_window: int | None, queries: slice, keys: int) -> Tensor:
        """bool (R, 1, queries, keys), True where a query attends to one of the first `keys` keys.
        Sliding windows count logical positions."""
        position = self._position[:, queries, None]
        key_position = self._key_position[:, None, :keys]
        visible = (key_position <= position) & self._key_valid[:, None, :keys]
        if sliding_window is not None:
            visible &= key_position > position - sliding_window
        # A padded query attends to every key, since a softmax over no keys is NaN. Its output is
        # dropped.
        visible |= ~self.valid[:, queries, None]
        return visible[:, None]


class _ToRows(torch.autograd.Function):
    """Converts packed tokens (T, H, D) to one tensor (R, W, H, D) for each set of rows. Every token
    has exactly one place in the rows, so the backward is a gather, which is several times faster
    than autograd's addition."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, place: Tensor, *indices: Tensor) -> Any:
        ctx.save_for_backward(place)
        return tuple(
            tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])
            for index in indices
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (place,) = ctx.saved_tensors
        flat = torch.cat([gradient.flatten(0, 1) for gradient in gradients])
        return flat.index_select(0, place), None, *[None] * len(gradients)


class PackedLayout:
    """The attention of a packed row. `spans` cover the row: each prompt is followed by its
    completions, and prompts are numbered in order. Rows of one attention call have similar widths,
    which leaves little padding."""

    def __init__(self, spans: Sequence[Span], rows_per_call: int, device: torch.device) -> None:
        self._spans = spans
        self._rows_per_call = rows_per_call
        self._device = device

    @cached_property
    def _calls(self) -> CPUAttentionRanges:
        """Ranges for each span's self-attention, and for completions' attention to their prompt."""
        own = [slice(span.start, span.stop) for span in self._spans if span.stop > span.start]
        prompts = [slice(span.start, span.stop) for span in self._spans if span.prompt is None]
        ends = {span.prompt: span.stop for span in self._spans}  # of each prompt's last completion
        groups = [(slice(p.stop, ends.get(n, p.stop)), p) for n, p in enumerate(prompts)]
        shared = [(queries, keys) for queries, keys in groups if queries.stop > queries.start]
        return CPUAttentionRanges(own, shared)

    @cached_property
    def _segments(self) -> flash_gpu.GPUAttentionRanges:
        """The ranges of `_calls` in the format for a GPU."""
        own, shared = self._calls.own, self._calls.shared

        def segments(queries: Sequence[slice], keys: Sequence[slice]) -> flash_gpu.Segments:
            lengths = [[s.stop - s.start for s in slices] for slices in (queries, keys)]
            edges = (torch.tensor([0, *accumulate(of)], dtype=torch.int32) for of in lengths)
            of_queries, of_keys = (send(x, self._device) for x in edges)
            return flash_gpu.Segments(of_queries, of_keys, max(lengths[0]), max(lengths[1]))

        def tokens(slices: Sequence[slice]) -> Tensor:
            ranges = [torch.arange(s.start, s.stop) for s in slices]
            return send(torch.cat([torch.arange(0), *ranges]), self._device)

        queries, keys = [q for q, _ in shared], [k for _, k in shared]
        pairs = segments(queries, keys) if shared else None
        return flash_gpu.GPUAttentionRanges(
            segments(own, own), pairs, tokens(queries), tokens(keys)
        )

    @cached_property
    def _rows(self) -> tuple[list[_Rows], Tensor]:
        """One row for each prompt and completion, and the index of each token in the rows,
        flattened and concatenated."""
        prompts = [span for span in self._spans if span.prompt is None]
        others = [s for s in self._spans if s.prompt is not None and s.stop > s.start]
        others.sort(key=lambda span: (span.stop - span.start, span.start))
        rows = [_Rows(prompts, None)]
        for first in range(0, len(others), self._rows_per_call):
            rows.append(_Rows(others[first : first + self._rows_per_call], rows[0]))
        held = torch.cat([r.index[r.valid] for r in rows])
        where = torch.cat([r.valid.flatten() for r in rows]).nonzero()[:, 0]
        place = torch.empty_like(held).index_put((held,), where)
        return [r.to(self._device) for r in rows], send(place, self._device)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention: query (1, H, T, D), key and value (1, H_kv, T, D) to (1, T, H, D)."""
        plain = options.softcap is None and options.sinks is None
        if not plain or options.sliding_window is not None:
            return self._attend_in_rows(query, key, value, options)
        dtype, device, scaling = value.dtype, query.device, options.scaling_of(query)
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        same = query.shape[-1] == value.shape[-1]
        if same and flash_gpu.has_segments(device, dtype, query.shape[-1]):
            query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
            calls = self._segments
            return flash_gpu.attend_packed(query, key, value, calls, scaling=scaling)[None]
        if device.type == "cpu" and torch_compat.has_cpu_flash():
            # The backward in 16 bits is many times slower on a CPU, so float32 is used.
            dtype = torch.promote_types(value.dtype, torch.float32)
            given = value.dtype
            query, key, value = (x[0].to(dtype) for x in (query, key, value))
            output = attend_packed(query, key, value, self._calls, scaling=scaling)
            return output[None].to(given)
        return self._attend_in_rows(query, key, value, options)

    def _attend_in_rows(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        all_rows, place = self._rows
        indices = [rows.index for rows in all_rows]
        queries, keys, values = (
            _ToRows.apply(x[0].transpose(0, 1), place, *indices) for x in (query, key, value)
        )
        outputs = []
        for rows, query, key, value in zip(all_rows, queries, keys, values, strict=True):
            if rows.prompt is not None:
                key = torch.cat([keys[0].index_select(0, rows.prompt), key], dim=1)
                value = torch.cat([values[0].index_select(0, rows.prompt), value], dim=1)
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            output = rows.attend(query, key, value, options)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return _FromRows.apply(torch.cat(outputs), place)[None]


class _FromRows(torch.autograd.Function):
    """Inverts _ToRows: rows, flattened and joined (S, H, D), to packed tokens (T, H, D)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Any:
        ctx.save_for_backward(place)
        ctx.size = rows.shape[0]
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (place,) = ctx.saved_tensors
        gradient = gradients[0].new_zeros(ctx.size, *gradients[0].shape[1:])
        return gradient.index_copy_(0, place, gradients[0]), None
