"""Rows of different lengths in one forward pass: the slots of their tokens, and attention masks.

A row's completion starts at slot 0 of its cache. The distance of two slots is then the distance of
their tokens, and no cache is moved when rows of different lengths are resumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.model.attention import round_inputs


class RaggedBatch:
    """A forward pass over the last tokens of R rows, padded on the left to `width`. `lengths` (R,)
    are the rows' lengths including these tokens. `pads` (R,) are the numbers of padding columns.
    The shortest row had `least` tokens before the pass; the longest has `most` after it."""

    def __init__(
        self, lengths: Tensor, width: int, pads: Tensor | None, *, least: int, most: int
    ) -> None:
        self.least = least
        self.most = most
        columns = torch.arange(width, device=lengths.device)
        self._slots = lengths[:, None] - width + columns
        if pads is None:
            rows = torch.arange(len(lengths), device=lengths.device)
            self._real = rows.repeat_interleave(width), columns.repeat(len(lengths))
        else:
            rows, columns = (columns >= pads[:, None]).nonzero(as_tuple=True)
            self._real = rows, columns
        self._own: dict[int | None, Tensor] = {}
        self._prompts: dict[int | None, Tensor | None] = {}

    def store(self, buffer: Tensor, states: Tensor) -> None:
        """Write keys or values (R, H, width, D) into their slots of a buffer (R or more, H, slots,
        D). Padding is left out, since its slots hold other tokens."""
        rows, columns = self._real
        kept = round_inputs(states).to(buffer.dtype)
        buffer[rows, :, self._slots[rows, columns]] = kept[rows, :, columns]

    def own_mask(self, first: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """The mask (R, 1, width, most - first) to add to the scores of the completions' keys, from
        slot `first` on."""
        if window not in self._own:
            slots = torch.arange(first, self.most, device=self._slots.device)
            distance = self._slots[:, :, None] - slots
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self._own[window] = _added(seen, dtype)
        return self._own[window]

    def prompt_mask(
        self, first: int, prompt_width: int, window: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """The mask (R, 1, width, prompt_width - first) to add to the scores of the prompts' keys,
        from slot `first` on. None if all these keys are within the window."""
        if window not in self._prompts:
            mask = None
            if window is not None and prompt_width + self.most > window:
                slots = torch.arange(first, prompt_width, device=self._slots.device)
                mask = _added(prompt_width + self._slots[:, :, None] - slots < window, dtype)
            self._prompts[window] = mask
        return self._prompts[window]


def _added(seen: Tensor, dtype: torch.dtype) -> Tensor:
    # The value is finite: with minus infinity, a row without any of these keys would be NaN. The
    # weight of such a row's result is 0.
    lowest = torch.finfo(dtype).min / 2
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, lowest)[:, None]
