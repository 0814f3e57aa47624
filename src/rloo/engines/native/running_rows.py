"""The active rows of a wave, with the state that each row needs for its next token."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.engines.counter_rng import uniforms, uniforms_at
from rloo.engines.in_process import PromptRow, limits_of
from rloo.types import Sampling

# The number of positions for which noise is computed at once.
_NOISE_BLOCK = 32


class ActiveRows:
    """The active rows of a wave: their last tokens, positions, noise and limits."""

    def __init__(
        self, rows: list[PromptRow], keys: Tensor, sampling: Sampling, *, vocabulary: int
    ) -> None:
        device = keys.device
        self.index: Tensor = torch.arange(len(rows), device=device)
        self.alive: Tensor = torch.ones(len(rows), dtype=torch.bool, device=device)
        # The position of each row's last token; `advance` moves it to the sampled token.
        self.positions: Tensor = torch.tensor(
            [len(p.token_ids) - 1 for p, _ in rows], device=device
        )
        self.tokens: Tensor = torch.zeros_like(self.index)
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1.0 and not sampling.greedy:
            self.seen = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
            lengths = torch.tensor([len(prompt.token_ids) for prompt, _ in rows])
            row = torch.arange(len(rows)).repeat_interleave(lengths)
            tokens = torch.tensor([token for prompt, _ in rows for token in prompt.token_ids])
            self.seen[row.to(device), tokens.to(device)] = True
        self._keys = keys
        self._noise = uniforms(keys, 0, _NOISE_BLOCK)
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        # The positions at which rows end, if their limits differ.
        limits = torch.tensor(limits_of(rows, sampling), device=device)
        differ = bool((limits != limits[0]).any())
        self._ends = self.positions + limits if differ else None
        self._can_end = differ or bool(sampling.stop_token_ids or sampling.stop_strings)

    def noise_at(self, position: int) -> Tensor:
        """The noise of the tokens at a position, float64 (R,)."""
        if position and position % _NOISE_BLOCK == 0:
            self._noise = uniforms(self._keys, position, _NOISE_BLOCK)
        return self._noise[:, position % _NOISE_BLOCK]

    def noise_of(self, position: Tensor) -> Tensor:
        """The result of `noise_at` for a position in a device tensor."""
        return uniforms_at(self._keys, position)

    def advance_in_place(self, tokens: Tensor) -> None:
        """Record the sampled tokens (R,) as `advance` does, but in tensors with fixed addresses. No
        row may have ended by a stop string."""
        kept = self.tokens.copy_(tokens)
        self.advance(kept, None)

    def advance(self, tokens: Tensor, ended: Tensor | None) -> None:
        """Record the sampled tokens (R,), and the rows `ended` (R,) by a stop string."""
        self.tokens = tokens
        self.positions += 1
        if self.seen is not None:
            self.seen[torch.arange(len(tokens), device=tokens.device), tokens] = True
        if len(self._stops):
            self.alive &= (tokens[:, None] != self._stops).all(dim=-1)
        if ended is not None:
            self.alive &= ~ended
        if self._ends is not None:
            self.alive &= self.positions < self._ends

    def count_unfinished(self) -> int:
        """The number of unfinished rows."""
        # Without stop strings, this is the only synchronization of a step with the device.
        return int(self.alive.sum()) if self._can_end else len(self.alive)

    def keep(self, order: Tensor) -> None:
        """Keep only the rows with the indices `order`, in this order."""
        for name in ("index", "alive", "positions", "tokens", "seen", "_keys", "_noise", "_ends"):
            if (rows := getattr(self, name)) is not None:
                setattr(self, name, rows[order])
