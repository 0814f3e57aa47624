"""Attention over packed groups: each prompt once, its K completions after it.

The packed row is `prompt, completion 1, completion 2, ..., next prompt, ...`; everything in a model
but attention treats tokens one by one and never notices. Here they are gathered into rows, one per
prompt and completion: a prompt attends to itself, a completion to its prompt and its own past.
Knows nothing of samples, rewards or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloo.attention import Options, attend


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop` of the packed row; `prompt` numbers the prompt they continue, if
    they are a completion."""

    start: int
    stop: int
    prompt: int | None = None


class _Rows:
    """Spans that attend in one call, padded to equal width: R rows of W tokens."""

    def __init__(self, spans: Sequence[Span], prompts: _Rows | None) -> None:
        lengths = torch.tensor([span.stop - span.start for span in spans])
        columns = torch.arange(int(lengths.max()))
        starts = torch.tensor([span.start for span in spans])
        self.valid = columns < lengths[:, None]
        self.index = torch.where(self.valid, starts[:, None] + columns, 0)
        self.prompt: Tensor | None = None
        # Of queries (R, W) and keys (R, L); the masks (R, W, L) are made where they are used.
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

    def to(self, device: torch.device) -> None:
        for name in ("valid", "index", "prompt", "_position", "_key_position", "_key_valid"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.to(device))

    def mask(self, sliding_window: int | None) -> Tensor:
        """bool (R, 1, W, L): True where a query sees a key. Windows count logical positions."""
        if sliding_window not in self._masks:
            position, key_position = self._position[:, :, None], self._key_position[:, None]
            visible = (key_position <= position) & self._key_valid[:, None]
            if sliding_window is not None:
                visible &= key_position > position - sliding_window
            # A padded query sees everything: its output is dropped, and a softmax over no key is
            # NaN.
            visible |= ~self.valid[:, :, None]
            self._masks[sliding_window] = visible[:, None]
        return self._masks[sliding_window]


class _ToRows(torch.autograd.Function):
    """Packed tokens (T, H, D) to one (R, W, H, D) for each set of rows.

    Every token stands in exactly one place, so the backward is a gather as well, where autograd's
    own would add up into zeros, several times slower.
    """

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
    """Which token of a packed row sees which. `spans` cover the row; prompts are numbered in their
    order. Rows of one attention call are sorted by width, so that little is padded."""

    def __init__(self, spans: Sequence[Span], rows_per_call: int) -> None:
        prompts = [span for span in spans if span.prompt is None]
        others = [s for s in spans if s.prompt is not None and s.stop > s.start]
        others.sort(key=lambda span: (span.stop - span.start, span.start))
        self._rows = [_Rows(prompts, None)]
        for first in range(0, len(others), rows_per_call):
            self._rows.append(_Rows(others[first : first + rows_per_call], self._rows[0]))
        # Where the rows, flattened and joined, hold each token.
        held = torch.cat([rows.index[rows.valid] for rows in self._rows])
        where = torch.cat([rows.valid.flatten() for rows in self._rows]).nonzero()[:, 0]
        self._place = torch.empty_like(held).index_put((held,), where)

    def to(self, device: torch.device) -> PackedLayout:
        """Move the index tensors to `device`, in place; returns itself."""
        self._place = self._place.to(device)
        for rows in self._rows:
            rows.to(device)
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """query (1, H, T, D), key and value (1, H_kv, T, D) to (1, T, H, D)."""
        indices = [rows.index for rows in self._rows]
        queries, keys, values = (
            _ToRows.apply(x[0].transpose(0, 1), self._place, *indices) for x in (query, key, value)
        )
        outputs = []
        for number, rows in enumerate(self._rows):
            row_keys, row_values = keys[number], values[number]
            if rows.prompt is not None:
                row_keys = torch.cat([keys[0].index_select(0, rows.prompt), row_keys], dim=1)
                row_values = torch.cat([values[0].index_select(0, rows.prompt), row_values], dim=1)
            output = attend(
                queries[number].transpose(1, 2),
                row_keys.transpose(1, 2),
                row_values.transpose(1, 2),
                rows.mask(options.sliding_window),
                options,
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return _FromRows.apply(torch.cat(outputs), self._place)[None]


class _FromRows(torch.autograd.Function):
    """Rows, flattened and joined (S, H, D), to packed tokens (T, H, D): the inverse of _ToRows."""

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
