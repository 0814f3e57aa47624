"""Packed prefill for the C kernels: prompts follow each other in a single row without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rloo.kernels.cpu_attention import SpanTable, attend
from rloo.model.attention import AttentionOptions


class PackedPrompts:
    """Keys and values of P prompts. Each forward pass computes those of some of the prompts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths: Tensor = torch.tensor(lengths)
        self._table = SpanTable(torch.empty(0), torch.empty(0), 0)
        self._states: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def begin(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prepare a forward over the next prompts, which have these `lengths`. Returns the
        positions (1, T) of the T tokens, and the index of each prompt's last token."""
        stops = torch.tensor(lengths).cumsum(0)
        starts = stops - torch.tensor(lengths)
        spans = torch.stack([starts, stops, starts, starts], dim=1)
        self._table = SpanTable(spans, torch.arange(len(lengths) + 1), max(lengths))
        return torch.cat([torch.arange(length) for length in lengths])[None], stops - 1

    def get_seq_length(self) -> int:
        """Always 0, since a prompt is computed in one forward pass."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        """Store keys and values (1, H_kv, T, D)."""
        states = _by_token(key_states), _by_token(value_states)
        self._states.setdefault(layer_idx, []).append(states)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of each prompt to itself: maps query (1, H, T, D) to the output (1, T, H,
        D)."""
        query, key, value = (_by_token(states) for states in (query, key, value))
        output, _ = attend(query, key, value, self._table, options.scaling_of(query))
        return output[None]

    def take_states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values of each layer, (P, H_kv, longest, D), padded on the right.
        Yielded tensors are removed from this cache."""
        starts = self.lengths.cumsum(0) - self.lengths
        slots = starts[:, None] + torch.arange(int(self.lengths.max()))
        slots.clamp_(max=int(self.lengths.sum()) - 1)
        for layer in sorted(self._states):
            keys, values = zip(*self._states.pop(layer), strict=True)
            yield torch.cat(keys)[slots].transpose(1, 2), torch.cat(values)[slots].transpose(1, 2)


def _by_token(states: Tensor) -> Tensor:
    """Reshape (1, H, T, D) to (T, H, D)."""
    return states[0].transpose(0, 1).contiguous()
