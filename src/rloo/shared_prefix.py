"""Attention over packed groups: each prompt once, its K completions after it.

The packed row is `prompt, completion 1, completion 2, ..., next prompt, ...`; everything in a model
but attention treats tokens one by one and never notices. Here queries and keys are gathered into
rows: a prompt attends to itself, a completion to its prompt and its own past. Knows nothing of
samples, rewards or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloo.attention import Options, attend


class _Rows:
    """Queries that attend together: gathered to rows of equal width, shorter rows padded.

    query_index (R, Q) and key_index (R, L) point into the packed row; padding points to token 0.
    """

    def __init__(self, queries: list[list[int]], keys: list[list[int]], positions: list[int]):
        self.query_index, query_valid = _pad(queries)
        self.key_index, key_valid = _pad(keys)
        position_T = torch.tensor(positions)
        # A padded query sees everything: its output is dropped, and a row of softmax over no key
        # would be NaN.
        distance = position_T[self.query_index][:, :, None] - position_T[self.key_index][:, None, :]
        self.distance = distance
        self.visible = (key_valid[:, None, :] & (distance >= 0)) | ~query_valid[:, :, None]
        self.query_valid = query_valid

    def to(self, device: torch.device) -> None:
        for name in ("query_index", "key_index", "distance", "visible", "query_valid"):
            setattr(self, name, getattr(self, name).to(device))

    def mask(self, sliding_window: int | None) -> Tensor:
        """bool (R, 1, Q, L)"""
        if sliding_window is None:
            return self.visible[:, None]
        near = (self.distance < sliding_window) | ~self.query_valid[:, :, None]
        return (self.visible & near)[:, None]


def _pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max((len(row) for row in rows), default=0)
    index = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long)
    lengths = torch.tensor([len(row) for row in rows])
    return index, torch.arange(width)[None, :] < lengths[:, None]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `stop` of the packed row; `prompt` is the span they continue, if any."""

    start: int
    stop: int
    prompt: Span | None = None


class PackedLayout:
    """Which token of a packed row sees which: made of the spans of prompts and completions."""

    def __init__(self, spans: Sequence[Span], positions: list[int], rows_per_call: int) -> None:
        self._rows: list[_Rows] = []
        offset = 0
        place = [0] * len(positions)
        for part in _parts(spans, rows_per_call):
            queries = [list(range(span.start, span.stop)) for span in part]
            keys = [
                (list(range(s.prompt.start, s.prompt.stop)) if s.prompt else []) + own
                for s, own in zip(part, queries, strict=True)
            ]
            rows = _Rows(queries, keys, positions)
            width = rows.query_index.shape[1]
            for number, tokens in enumerate(queries):
                for column, token in enumerate(tokens):
                    place[token] = offset + number * width + column
            offset += rows.query_index.numel()
            self._rows.append(rows)
        self._place = torch.tensor(place)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def to(self, device: torch.device) -> PackedLayout:
        """Move the index tensors to `device`, in place; returns itself."""
        self._place = self._place.to(device)
        for rows in self._rows:
            rows.to(device)
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """query (1, H, T, D), key and value (1, H_kv, T, D) to (1, T, H, D)."""
        query_T, key_T, value_T = (x[0].transpose(0, 1) for x in (query, key, value))
        outputs = []
        for number, rows in enumerate(self._rows):
            output = attend(
                _gather(query_T, rows.query_index),
                _gather(key_T, rows.key_index),
                _gather(value_T, rows.key_index),
                self._mask(number, options.sliding_window),
                options,
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._place)[None]

    def _mask(self, number: int, sliding_window: int | None) -> Tensor:
        cached = self._masks.get((number, sliding_window))
        if cached is None:
            cached = self._rows[number].mask(sliding_window)
            self._masks[number, sliding_window] = cached
        return cached


def _gather(tokens: Tensor, index: Tensor) -> Tensor:
    """(T, H, D) and (R, L) to (R, H, L, D)"""
    picked = tokens.index_select(0, index.flatten())
    return picked.view(*index.shape, *tokens.shape[1:]).transpose(1, 2)


def _parts(spans: Sequence[Span], rows_per_call: int) -> list[list[Span]]:
    """Prompts and completions apart, each sorted by width and cut, so that little is padded."""
    parts = []
    for chosen in ([s for s in spans if s.prompt is None], [s for s in spans if s.prompt]):
        filled = [span for span in chosen if span.stop > span.start]
        filled.sort(key=lambda s: (s.stop - s.start, s.start))
        parts += [filled[i : i + rows_per_call] for i in range(0, len(filled), rows_per_call)]
    return parts
