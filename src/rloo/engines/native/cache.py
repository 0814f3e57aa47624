"""The two caches of the native engine, which are also the layouts of its attention. Prompts are
padded on the left, so that the distance of two slots is the distance of their tokens and a sliding
window is a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from rloo.model.attention import Options, attend, attend_part, causal_mask, round_inputs

# The initial number of slots in a completion's cache, which doubles when it is full.
_FIRST_SLOTS = 64


def fill_holes(alive: Tensor) -> Tensor:
    """The old index of each new row, int64 (n,), when n rows are alive. The last ones fill holes,
    so that few rows move: (True, False, True, True) gives (0, 3, 2)."""
    count = int(alive.sum())
    order = torch.arange(count, device=alive.device)
    order[(~alive[:count]).nonzero()[:, 0]] = alive[count:].nonzero()[:, 0] + count
    return order


def _reorder(buffers: dict[int, Tensor], order: Tensor) -> None:
    """Reorder the rows of each buffer in place by `order` from `fill_holes`."""
    moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
    source = order[moved]
    for layer, buffer in buffers.items():
        buffer[moved] = buffer[source]
        buffers[layer] = buffer[: len(order)]


class PromptCache(Cache):
    """Keys and values of P prompts, left-padded to one width; one forward per chunk fills them."""

    def __init__(self, num_prompts: int, width: int) -> None:
        super().__init__(layers=[])
        self.num_prompts = num_prompts
        self.width = width
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.padding: list[Tensor] = []
        self._masks: dict[int | None, Tensor] = {}

    def begin(self, start: int, pads: Tensor, width: int) -> None:
        """Announce a forward over the B prompts from `start`, padded by `pads` (B,) to `width`."""
        self._start = start
        self._pads = pads
        self._masks = {}
        self.padding.append(pads + (self.width - width))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the chunk's keys and values (B, H_kv, width, D), and return what it attends to."""
        for buffers, states in ((self.keys, key_states), (self.values, value_states)):
            rows, heads, width, size = states.shape
            kept = round_inputs(states)
            if layer_idx not in buffers:
                # Zeros, since padding gets the weight 0, and 0 times an undefined NaN is NaN.
                buffers[layer_idx] = kept.new_zeros(self.num_prompts, heads, self.width, size)
            buffers[layer_idx][self._start : self._start + rows, :, self.width - width :] = kept
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a prompt is computed in one forward pass."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attention of a chunk to itself: query (B, H, width, D), result (B, width, H, D)."""
        window = options.sliding_window
        if window not in self._masks:
            self._masks[window] = self._mask(query.shape[2], window)
        return attend(query, key, value, self._masks[window], options).transpose(1, 2)

    def _mask(self, width: int, window: int | None) -> Tensor:
        """bool (B or 1, 1, width, width). Padding sees itself, since a query must see a key."""
        device = self._pads.device
        mask = causal_mask(width, width, device, window)[None, None]
        if not self._pads.any():
            return mask
        slots = torch.arange(width, device=device)
        real = slots >= self._pads[:, None]
        return mask & (real[:, None, None, :] | (slots[:, None] == slots))


class DecodeCache(Cache):
    """Keys and values of the completions, in addition to those of their prompts. As in Hydragen
    (Juravsky et al. 2024), the queries of a group attend together to the prompt's keys, which are
    stored and read once, and each row to its own; both weighted by their share of the softmax."""

    def __init__(self, prompts: PromptCache, prompt_of_row: Tensor, *, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.length = 0
        self._width = prompts.width
        self._max_tokens = max_tokens
        self._prompt_keys = prompts.keys
        self._prompt_values = prompts.values
        padding = torch.cat(prompts.padding)
        self._padding = padding if bool(padding.any()) else None
        self._mask: Tensor | None = None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._layer = 0
        self._group_rows(prompt_of_row, prompts.num_prompts)

    def _group_rows(self, prompt_of_row: Tensor, num_prompts: int) -> None:
        """Assign each row a place among the `num_prompts * group_size` places of the groups."""
        device = prompt_of_row.device
        counts = prompt_of_row.bincount(minlength=num_prompts)
        self._prompt_of_row = prompt_of_row
        self._num_prompts = num_prompts
        self._group_size = int(counts.max())
        order = prompt_of_row.argsort(stable=True)
        first = counts.cumsum(0) - counts
        number = torch.arange(len(order), device=device) - first[prompt_of_row[order]]
        place = torch.empty_like(order)
        place[order] = prompt_of_row[order] * self._group_size + number
        rows = torch.arange(len(place), device=device)
        row_at = torch.zeros(num_prompts * self._group_size, dtype=torch.long, device=device)
        row_at[place] = rows
        in_place = len(row_at) == len(place) and bool((place == rows).all())
        self._place_of_row = None if in_place else place
        self._row_at_place = None if in_place else row_at

    def keep(self, order: Tensor) -> None:
        """Keep the rows `order` from `fill_holes`; prompts without rows are dropped."""
        _reorder(self._keys, order)
        _reorder(self._values, order)
        prompt_of_row = self._prompt_of_row[order]
        used = torch.zeros(self._num_prompts, dtype=torch.bool, device=order.device)
        used[prompt_of_row] = True
        prompts = fill_holes(used)
        if len(prompts) < self._num_prompts:
            _reorder(self._prompt_keys, prompts)
            _reorder(self._prompt_values, prompts)
            renumbered = torch.zeros_like(used, dtype=torch.long)
            renumbered[prompts] = torch.arange(len(prompts), device=order.device)
            prompt_of_row = renumbered[prompt_of_row]
            if self._padding is not None:
                self._padding = self._padding[prompts]
                self._mask = None
        self._group_rows(prompt_of_row, len(prompts))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the step's keys and values (R, H_kv, 1, D); `attend` reads the buffers."""
        self._layer = layer_idx
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            kept = round_inputs(states)
            buffer = buffers.get(layer_idx)
            if buffer is None or buffer.shape[2] == self.length:
                buffer = buffers[layer_idx] = self._grow(buffer, kept)
            buffer[:, :, self.length : self.length + 1].copy_(kept)
        return key_states, value_states

    def _grow(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        slots = min(self._max_tokens, max(_FIRST_SLOTS, 2 * self.length))
        grown = states.new_empty(rows, heads, slots, size)
        if buffer is not None:
            grown[:, :, : self.length] = buffer
        return grown

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before the token that comes next, padding included."""
        return self._width + self.length

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Attention: query (R, H, 1, D). This step's key and value are already in the buffers."""
        rounded = round_inputs(query)
        if not torch.is_autocast_enabled(query.device.type):
            return self._attend(rounded, options).to(value.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(rounded, options).to(value.dtype)

    def _attend(self, query: Tensor, options: Options) -> Tensor:
        rows, heads, _, size = query.shape
        last = self.length + 1
        window = options.sliding_window
        first = 0 if window is None else max(0, self._width + last - window)
        own = slice(max(0, first - self._width), last)
        own_keys = self._keys[self._layer][:, :, own]
        own_values = self._values[self._layer][:, :, own]
        kv_heads = own_keys.shape[1]
        query = query.reshape(rows, kv_heads, heads // kv_heads, size)
        output, normalizer = attend_part(query, own_keys, own_values, None, options)
        if first < self._width:
            groups = self._gather_groups(query)
            mask = None
            if self._padding is not None:
                mask = self._padding_mask(query.dtype)[..., first:]
                mask = mask.expand(-1, -1, groups.shape[2], -1)
            keys = self._prompt_keys[self._layer][:, :, first:]
            values = self._prompt_values[self._layer][:, :, first:]
            prompt_output, prompt_normalizer = attend_part(groups, keys, values, mask, options)
            more = self._scatter_groups(prompt_normalizer, rows) - normalizer
            output = output.lerp(self._scatter_groups(prompt_output, rows), more.sigmoid())
            if options.sinks is not None:
                normalizer = normalizer + F.softplus(more)
        output = output.reshape(rows, 1, heads, -1)
        if options.sinks is None:
            return output
        share = normalizer.reshape(rows, 1, heads, 1) - options.sinks.view(1, 1, -1, 1)
        return output * share.sigmoid()

    def _padding_mask(self, dtype: torch.dtype) -> Tensor:
        """(P, 1, 1, width), to be added to scores: minus infinity where a prompt has no token."""
        if self._mask is None:
            assert self._padding is not None
            slots = torch.arange(self._width, device=self._padding.device)
            absent = slots < self._padding[:, None]
            mask = torch.zeros(absent.shape, dtype=dtype, device=absent.device)
            self._mask = mask.masked_fill_(absent, float("-inf"))[:, None, None]
        return self._mask

    def _gather_groups(self, rows: Tensor) -> Tensor:
        """Reshape (R, H_kv, repeats, X) to (P, H_kv, group size * repeats, X)."""
        if self._row_at_place is not None:
            rows = rows.index_select(0, self._row_at_place)
        _, heads, repeats, size = rows.shape
        groups = rows.view(self._num_prompts, self._group_size, heads, repeats, size)
        return groups.transpose(1, 2).reshape(self._num_prompts, heads, -1, size)

    def _scatter_groups(self, groups: Tensor, rows: int) -> Tensor:
        """Reshape (P, H_kv, group size * repeats, X) to (R, H_kv, repeats, X)."""
        _, heads, _, size = groups.shape
        parted = groups.view(self._num_prompts, heads, self._group_size, -1, size).transpose(1, 2)
        flat = parted.reshape(self._num_prompts * self._group_size, heads, -1, size)
        return flat if self._place_of_row is None else flat.index_select(0, self._place_of_row)
