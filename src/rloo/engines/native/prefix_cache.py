"""The native engine's prefix cache between two calls: the KV caches of a wave's rows, and the
tokens in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from rloo.engines.in_process import PromptRow, limits_of, pad_left
from rloo.engines.native.kv_cache import DecodeCache
from rloo.types import Sampling


@dataclass(frozen=True, slots=True)
class _PrefilledRow:
    """A row: its index in the cache, its cached tokens, and how many of these tokens are in the
    prompt cache."""

    number: int
    token_ids: list[int]
    shared: int

    def known(self, token_ids: Sequence[int]) -> int:
        """The length of the cached prefix of a row's new `token_ids`. The last token never counts,
        since it is computed again for the logits that follow it."""
        most = min(len(self.token_ids), len(token_ids) - 1)
        if token_ids[:most] == self.token_ids[:most]:
            return most
        pairs = zip(self.token_ids[:most], token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True, slots=True)
class Continuation:
    """The input for resumed rows: the tokens to compute and their positions, both (R, W) and padded
    on the left; the padding lengths (R,); and the number of each row's tokens in the prompt
    cache."""

    input_ids: Tensor
    positions: Tensor
    pads: Tensor
    shared: list[int]


class PrefixCache:
    """The caches of `rows` with the tokens `drawn` (R, W) after their prompts. `shared` is the
    number of each row's tokens in the prompt cache. The cache is valid for one version of the
    weights, and for at most `max_tokens` per completion, since memory was planned for this
    number."""

    def __init__(
        self,
        cache: DecodeCache,
        rows: Sequence[PromptRow],
        drawn: Tensor,
        shared: Sequence[int],
        max_tokens: int,
    ) -> None:
        self.cache = cache
        self._max_tokens = max_tokens
        self._begun: dict[tuple[int, int], _PrefilledRow] = {}
        every = zip(rows, drawn.tolist(), shared, cache.cached(), strict=True)
        for number, ((prompt, k), tokens, prefix, own) in enumerate(every):
            computed = [*prompt.token_ids, *tokens][: prefix + own]
            self._begun[prompt.noise_id, k] = _PrefilledRow(number, computed, prefix)

    def has(self, rows: Sequence[PromptRow], sampling: Sampling) -> bool:
        """Whether all of these rows can be resumed. A row can be resumed only if its cached prefix
        is at least as long as the part of the row that is in the prompt cache."""
        if sampling.max_tokens > self._max_tokens:
            return False
        found = ((self._begun.get((prompt.noise_id, k)), prompt) for prompt, k in rows)
        return all(
            begun is not None and begun.known(prompt.token_ids) >= begun.shared
            for begun, prompt in found
        )

    def resume(
        self, rows: Sequence[PromptRow], sampling: Sampling, pad_token_id: int
    ) -> Continuation:
        """Reduce the cache to the prefixes of these rows, and return the tokens to compute next."""
        begun = [self._begun[prompt.noise_id, k] for prompt, k in rows]
        known = [b.known(prompt.token_ids) for b, (prompt, _) in zip(begun, rows, strict=True)]
        shared = [b.shared for b in begun]
        rest = [prompt.token_ids[n:] for n, (prompt, _) in zip(known, rows, strict=True)]
        limits = limits_of(rows, sampling)
        ends = [len(p.token_ids) + limit for (p, _), limit in zip(rows, limits, strict=True)]
        longest = max(end - prefix for end, prefix in zip(ends, shared, strict=True))
        device = self.cache.device
        numbers = torch.tensor([b.number for b in begun], device=device)
        starts = torch.tensor(known, device=device)
        lengths = starts - torch.tensor(shared, device=device)
        self.cache.go_on(numbers, lengths, longest)
        input_ids, pads = pad_left(rest, pad_token_id, device)
        columns = torch.arange(input_ids.shape[1], device=device)
        positions = (starts[:, None] + columns - pads[:, None]).clamp_(min=0)
        return Continuation(input_ids, positions, pads, shared)
