"""The two KV caches of the native engine, which are also the layouts of its attention. Prompts are
padded on the left. The distance of two slots is then the distance of their tokens, and a sliding
window is a slice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from rloo.engines.native.ragged_prefill import RaggedBatch
from rloo.model.attention import AttentionOptions, attend, attend_part, causal_mask, round_inputs

# The initial number of slots in a completion's cache. The number doubles when the cache is full.
_FIRST_SLOTS = 64


def fill_holes(alive: Tensor) -> Tensor:
    """The old index of each new row, int64 (n,), when n rows are alive. The last rows fill the
    holes, so that few rows move: for (True, False, True, True) the result is (0, 3, 2)."""
    count = int(alive.sum())
    order = torch.arange(count, device=alive.device)
    order[(~alive[:count]).nonzero()[:, 0]] = alive[count:].nonzero()[:, 0] + count
    return order


def with_others(order: Tensor, total: int) -> Tensor:
    """`order` from `fill_holes`, followed by the other indices of `total` rows. For (0, 3, 2) and 4
    rows the result is (0, 3, 2, 1)."""
    whole = torch.arange(total, device=order.device)
    moved = (order != whole[: len(order)]).nonzero()[:, 0]
    whole[order[moved]] = moved
    whole[: len(order)] = order
    return whole


def _take(buffers: dict[int, Tensor], order: Tensor) -> None:
    """Replace each buffer by the rows `order` of the buffer, one buffer at a time."""
    for layer, buffer in buffers.items():
        buffers[layer] = buffer.index_select(0, order)


def _reorder(buffers: dict[int, Tensor], order: Tensor) -> None:
    """Reorder the rows of each buffer in place by `order` from `fill_holes` or `with_others`."""
    moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
    source = order[moved]
    for layer, buffer in buffers.items():
        buffer[moved] = buffer[source]
        buffers[layer] = buffer[: len(order)]


class PromptCache(Cache):
    """Keys and values of P prompts, left-padded to one width. One forward per chunk of prompts
    fills them. `dtype` is the type of keys, values and attention (None: see `round_inputs`)."""

    def __init__(self, num_prompts: int, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(layers=[])
        self.num_prompts = num_prompts
        self.width = width
        self.dtype = dtype
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.padding: list[Tensor] = []
        self._masks: dict[int | None, Tensor] = {}

    def rounded(self, states: Tensor) -> Tensor:
        """Queries, keys or values in the precision of attention."""
        return round_inputs(states) if self.dtype is None else states.to(self.dtype)

    def begin(self, start: int, pads: Tensor, width: int) -> None:
        """Prepare a forward over the B prompts from `start`, padded by `pads` (B,) to `width`."""
        self._start = start
        self._pads = pads
        self._masks = {}
        self.padding.append(pads + (self.width - width))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the chunk's keys and values (B, H_kv, width, D) and return them for attention."""
        for buffers, states in ((self.keys, key_states), (self.values, value_states)):
            rows, heads, width, size = states.shape
            kept = self.rounded(states)
            if layer_idx not in buffers:
                # Zeros, since padding has the weight 0, and 0 times an uninitialized NaN is NaN.
                buffers[layer_idx] = kept.new_zeros(self.num_prompts, heads, self.width, size)
            buffers[layer_idx][self._start : self._start + rows, :, self.width - width :] = kept
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0, since a prompt is computed in one forward pass."""
        return 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of a chunk to itself: maps query (B, H, width, D) to the output (B, width, H,
        D)."""
        window = options.sliding_window
        if window not in self._masks:
            self._masks[window] = self._mask(query.shape[2], window)
        dtype = value.dtype
        if self.dtype is not None:
            query, key, value = (x.to(self.dtype) for x in (query, key, value))
        return attend(query, key, value, self._masks[window], options).transpose(1, 2).to(dtype)

    def _mask(self, width: int, window: int | None) -> Tensor:
        """A bool mask (B or 1, 1, width, width). Padding attends to itself: a query needs a key."""
        device = self._pads.device
        mask = causal_mask(width, width, device, window)[None, None]
        if not self._pads.any():
            return mask
        slots = torch.arange(width, device=device)
        real = slots >= self._pads[:, None]
        return mask & (real[:, None, None, :] | (slots[:, None] == slots))


class DecodeCache(Cache):
    """Keys and values of completions and of their prompts. As in Hydragen (Juravsky et al. 2024),
    the queries of a group attend together to the prompt's keys, which are stored and read once, and
    each row attends to its completion's keys. The two results are averaged by their shares of the
    softmax.

    Every step computes all active rows. If their lengths differ, each row continues at its next
    slot (`RaggedBatch`). With `kept`, inactive rows are stored after the active rows, and can be
    resumed (`go_on`)."""

    def __init__(
        self, prompts: PromptCache, prompt_of_row: Tensor, *, max_tokens: int, kept: bool = False
    ) -> None:
        super().__init__(layers=[])
        # The numbers of completion tokens of the longest and the shortest active row.
        self.length: int = 0
        self._least = 0
        self._width = prompts.width
        self._max_tokens = max_tokens
        self._rounded = prompts.rounded
        self._prompt_keys = prompts.keys
        self._prompt_values = prompts.values
        padding = torch.cat(prompts.padding)
        self._padding = padding if bool(padding.any()) else None
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._layer, self._columns = 0, 1
        self._step: RaggedBatch | None = None
        # The original numbers of all rows and, with `kept`, their lengths; active rows come first.
        self._numbers = torch.arange(len(prompt_of_row), device=prompt_of_row.device)
        self._lengths = torch.zeros_like(self._numbers) if kept else None
        self._prompt_of_row = prompt_of_row
        self._group_rows(prompt_of_row, prompts.num_prompts)

    def _group_rows(self, prompt_of_row: Tensor, num_prompts: int) -> None:
        """Assign each row one of the `num_prompts * group_size` places of the groups."""
        device = prompt_of_row.device
        counts = prompt_of_row.bincount(minlength=num_prompts)
        self._num_prompts = num_prompts
        self._mask: Tensor | None = None
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
        self._num_rows = len(place)
        self._place_of_row = None if in_place else place
        self._row_at_place = None if in_place else row_at

    def keep(self, order: Tensor) -> None:
        """Keep only the rows `order` (from `fill_holes`) active, and the prompts of active rows."""
        rows = order
        if self._lengths is not None:
            self._note_lengths()
            rows = with_others(order, len(self._lengths))
            self._lengths = self._lengths[rows]
            self._numbers = self._numbers[rows]
        _reorder(self._keys, rows)
        _reorder(self._values, rows)
        self._prompt_of_row = self._prompt_of_row[rows]
        used = torch.zeros(self._count_prompts(), dtype=torch.bool, device=order.device)
        used[self._prompt_of_row[: len(order)]] = True
        prompts = fill_holes(used)
        if (left := len(prompts)) < self._num_prompts:
            if self._lengths is not None:
                prompts = with_others(prompts, len(used))
            _reorder(self._prompt_keys, prompts)
            _reorder(self._prompt_values, prompts)
            self._renumber(prompts, len(used))
        self._group_rows(self._prompt_of_row[: len(order)], left)
        self._measure()

    def _count_prompts(self) -> int:
        """The number of prompts in the buffers, with or without active rows."""
        return len(next(iter(self._prompt_keys.values())))

    def _renumber(self, prompts: Tensor, total: int) -> None:
        """Renumber the prompts of rows after prompts were reordered or selected. `prompts` are the
        old numbers of the prompts, `total` is their old count."""
        renumbered = torch.zeros(total, dtype=torch.long, device=prompts.device)
        renumbered[prompts] = torch.arange(len(prompts), device=prompts.device)
        self._prompt_of_row = renumbered[self._prompt_of_row]
        if self._padding is not None:
            self._padding = self._padding[prompts]

    # -- resuming rows ---------------------------------------------------------------------------

    def _note_lengths(self) -> None:
        """Store the lengths of active rows. While the lengths are equal, they are not stored per
        row."""
        assert self._lengths is not None
        if self._least == self.length:
            self._lengths[: self._num_rows] = self.length

    def _measure(self) -> None:
        """Update the shortest and the longest length of active rows."""
        if self._least < self.length:
            assert self._lengths is not None
            lengths = self._lengths[: self._num_rows]
            self._least, self.length = int(lengths.min()), int(lengths.max())

    @property
    def device(self) -> torch.device:
        """The device of the cache's tensors."""
        return self._numbers.device

    def cached(self) -> list[int]:
        """The number of cached completion tokens of each row, in the original order of rows."""
        assert self._lengths is not None
        self._note_lengths()
        return self._lengths[self._numbers.argsort()].tolist()

    def go_on(self, rows: Tensor, lengths: Tensor, max_tokens: int) -> None:
        """Resume only the rows with these original numbers. Their first `lengths` completion tokens
        stay in the cache. Rows may have at most `max_tokens` completion tokens."""
        assert self._lengths is not None
        places = self._numbers.argsort()[rows]
        _take(self._keys, places)
        _take(self._values, places)
        self._prompt_of_row = self._prompt_of_row[places]
        prompts = self._prompt_of_row.unique()
        if len(prompts) < (total := self._count_prompts()):
            _take(self._prompt_keys, prompts)
            _take(self._prompt_values, prompts)
            self._renumber(prompts, total)
        self._numbers = torch.arange(len(rows), device=rows.device)
        self._lengths = lengths
        self._max_tokens = max_tokens
        self._group_rows(self._prompt_of_row, len(prompts))
        self._least, self.length = int(lengths.min()), int(lengths.max())

    def expect(self, width: int, pads: Tensor | None = None) -> None:
        """Prepare a forward over `width` tokens of each active row. The first `pads` (R,) tokens of
        each row are padding."""
        self._step, self._columns = None, width
        if width == 1 and pads is None and self._least == self.length:
            self.length += 1
            self._least += 1
            return
        assert self._lengths is not None
        self._note_lengths()
        least = self._least
        lengths = self._lengths[: self._num_rows]
        if pads is None:
            lengths += width
            self._least, self.length = least + width, self.length + width
        else:
            lengths += width - pads
            self._least, self.length = int(lengths.min()), int(lengths.max())
        self._step = RaggedBatch(lengths, width, pads, least=least, most=self.length)

    # -- a forward pass --------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values (R, H_kv, width, D) of the tokens that `expect` announced.
        `attend` reads the buffers."""
        self._layer = layer_idx
        for buffers, states in ((self._keys, key_states), (self._values, value_states)):
            buffer = buffers.get(layer_idx)
            if buffer is None or buffer.shape[2] < self.length:
                buffer = buffers[layer_idx] = self._grow(buffer, self._rounded(states))
            if self._step is not None:
                self._step.store(buffer, states)
            else:
                kept = self._rounded(states)
                buffer[: len(kept), :, self.length - 1 : self.length].copy_(kept)
        return key_states, value_states

    def _grow(self, buffer: Tensor | None, states: Tensor) -> Tensor:
        rows, heads, _, size = states.shape
        held = 0 if buffer is None else buffer.shape[2]
        slots = max(self.length, min(self._max_tokens, max(_FIRST_SLOTS, 2 * held)))
        if self._lengths is None:
            grown = states.new_empty(rows, heads, slots, size)
        else:  # zeros, since slots after a shorter row have the weight 0: see PromptCache
            grown = states.new_zeros(len(self._lengths), heads, slots, size)
        if buffer is not None:
            grown[:, :, :held] = buffer
        return grown

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of positions before the next tokens, padding included."""
        return self._width + self.length - self._columns

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of query (R, H, width, D). This step's keys and values are already in the
        buffers."""
        rounded = self._rounded(query)
        if not torch.is_autocast_enabled(query.device.type):
            return self._attend(rounded, options).to(value.dtype)
        with torch.autocast(query.device.type, enabled=False):
            return self._attend(rounded, options).to(value.dtype)

    def _attend(self, query: Tensor, options: AttentionOptions) -> Tensor:
        rows, heads, width, size = query.shape
        window = options.sliding_window
        # `first` is the first slot that any query attends to, counted from the prompts' first slot.
        earliest = self.length if self._step is None else self._step.least + 1
        first = 0 if window is None else max(0, self._width + earliest - window)
        own = slice(max(0, first - self._width), self.length)
        own_keys = self._keys[self._layer][:rows, :, own]
        own_values = self._values[self._layer][:rows, :, own]
        kv_heads = own_keys.shape[1]
        query = query.reshape(rows, kv_heads, heads // kv_heads * width, size)
        mask = None
        if self._step is not None:
            mask = self._step.own_mask(own.start, window, query.dtype)
            mask = _repeat(mask, heads // kv_heads)
        output, normalizer = attend_part(query, own_keys, own_values, mask, options)
        if first < self._width:
            groups = self._gather_groups(query)
            keys = self._prompt_keys[self._layer][: self._num_prompts, :, first:]
            values = self._prompt_values[self._layer][: self._num_prompts, :, first:]
            mask = self._prompt_mask(groups, first, window, heads // kv_heads)
            prompt_output, prompt_normalizer = attend_part(groups, keys, values, mask, options)
            more = self._scatter_groups(prompt_normalizer, rows) - normalizer
            output = output.lerp(self._scatter_groups(prompt_output, rows), more.sigmoid())
            if options.sinks is not None:
                normalizer = normalizer + F.softplus(more)
        output = output.reshape(rows, heads, width, -1).transpose(1, 2)
        if options.sinks is None:
            return output
        normalizer = normalizer.reshape(rows, heads, width, 1).transpose(1, 2)
        return output * (normalizer - options.sinks.view(1, 1, -1, 1)).sigmoid()

    def _prompt_mask(
        self, groups: Tensor, first: int, window: int | None, repeats: int
    ) -> Tensor | None:
        """The mask (P, 1, group size * repeats, width - first) to add to scores, or None."""
        mask = None
        if self._step is not None:
            mask = self._step.prompt_mask(first, self._width, window, groups.dtype)
        if mask is not None:
            mask = self._gather_groups(_repeat(mask, repeats))
        if self._padding is not None:
            absent = self._padding_mask(groups.dtype)[..., first:]
            mask = absent.expand(-1, -1, groups.shape[2], -1) if mask is None else mask + absent
        return mask

    def _padding_mask(self, dtype: torch.dtype) -> Tensor:
        """The mask (P, 1, 1, width) to add to scores: minus infinity at the padding of prompts."""
        if self._mask is None:
            assert self._padding is not None
            slots = torch.arange(self._width, device=self._padding.device)
            absent = slots < self._padding[: self._num_prompts, None]
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


def _repeat(mask: Tensor, times: int) -> Tensor:
    """Repeat a mask (R, 1, Q, L) for `times` heads: (R, 1, times * Q, L)."""
    rows, _, width, slots = mask.shape
    return mask.expand(-1, times, -1, -1).reshape(rows, 1, times * width, slots)
