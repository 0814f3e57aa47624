"""Decoding by steps of fixed shapes: a GPU replays a step with two launches instead of thousands.

A wave has memory for all of its tokens, at fixed addresses. The number of tokens, which grows from
step to step, is a tensor. Finished rows stay in the batch, but are masked. When the unfinished rows
fit into a smaller batch size (a power of two, at least LEAST_ROWS), these rows are moved to the
front, and a step of that size is captured. The host synchronizes with the device only every few
steps, to count the unfinished rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.engines.in_process import SampledTokens
from rloo.engines.native.cuda_graphs import CapturedGraph, GraphedFunction, new_pool
from rloo.engines.native.fused_decoder import FusedDecoder
from rloo.engines.native.kv_cache import PromptCache
from rloo.engines.native.running_rows import ActiveRows
from rloo.engines.sampling import StopStringMatcher, draw
from rloo.kernels import gpu_kernels
from rloo.model import flash_gpu
from rloo.model.attention import AttentionOptions
from rloo.model.flash_gpu import Segments, attend_segments
from rloo.types import Sampling

# The number of steps between two counts of unfinished rows by the host. With stop strings the host
# counts at every step.
STEPS_A_LOOK = 8
# With fewer rows a step is hardly faster. A step reads all weights, which takes longer than the
# computation below a few hundred rows (H100: 990 TFLOP/s in 16 bits over 3.35 TB/s, 300 rows).
LEAST_ROWS = 64


def smaller_size(size: int, alive: int) -> int:
    """The batch size of the next steps if `alive` of `size` rows are unfinished: the smallest power
    of two that is not below `alive`, but at least LEAST_ROWS and at most `size`.

    >>> smaller_size(200, 130), smaller_size(200, 65), smaller_size(128, 1), smaller_size(48, 1)
    (200, 128, 64, 48)
    """
    return min(size, max(LEAST_ROWS, 1 << (alive - 1).bit_length()))


def can_decode(
    cache_dtype: torch.dtype | None, decoder: FusedDecoder, device: torch.device
) -> bool:
    """Whether this module can decode: the device has attention over segments in `cache_dtype`, and
    no layer has a sliding window."""
    if cache_dtype is None or decoder.has_windows:
        return False
    return flash_gpu.has_segments(device, cache_dtype, decoder.head_size)


class StaticCache:
    """Keys and values of R rows, with `slots` tokens each, and of their packed prompts, for forward
    passes over one token per row. `prompt_of_row` (R,) must be sorted. This class is used instead
    of `DecodeCache`."""

    def __init__(self, prompts: PromptCache, prompt_of_row: Tensor, slots: int) -> None:
        assert prompts.dtype is not None
        device, pads = prompt_of_row.device, torch.cat(prompts.padding)
        self._dtype, self._slots, self._width = prompts.dtype, slots, prompts.width
        self.size: int = len(prompt_of_row)
        self._prompt_of_row = prompt_of_row
        # The number of completion tokens of each row before the token that is computed.
        self.length: Tensor = torch.zeros(1, dtype=torch.long, device=device)
        real = torch.arange(self._width, device=device) >= pads[:, None]
        place = real.flatten().nonzero()[:, 0]
        lengths = F.pad((self._width - pads).cumsum(0), (1, 0))
        self._prompt_edges, self._longest = lengths.int(), self._width
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in list(prompts.keys):
            pair = prompts.keys.pop(layer), prompts.values.pop(layer)  # freed one by one
            _, heads, _, size = pair[0].shape
            packed = (x.transpose(1, 2).flatten(0, 1).index_select(0, place) for x in pair)
            self._prompts[layer] = next(packed), next(packed)
            # Zeros, since no slot may be NaN: see PromptCache.
            shape = self.size, slots, heads, size
            own = (torch.zeros(shape, dtype=self._dtype, device=device) for _ in pair)
            self._own[layer] = next(own), next(own)
        self.used: Tensor = torch.ones(self.size, dtype=torch.int32, device=device)
        self._settle()

    def _settle(self) -> None:
        """Compute the segments of `size` rows: rows of each prompt, and slots of each row."""
        device, size = self.used.device, self.size
        prompts = torch.arange(len(self._prompt_edges), device=device)
        edges = torch.searchsorted(self._prompt_of_row[:size].contiguous(), prompts).int()
        most = int(edges.diff().max())
        self._shared = Segments(edges, self._prompt_edges, most, self._longest)
        rows = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._alone = Segments(rows, rows * self._slots, 1, self._slots)

    def keep(self, order: Tensor) -> None:
        """Keep only the rows with the indices `order`, which must be sorted by prompt."""
        self.size = len(order)
        for buffers in self._own.values():
            for buffer in buffers:
                buffer[: self.size] = buffer.index_select(0, order)
        self._prompt_of_row = self._prompt_of_row[order]
        self._settle()

    def see(self, alive: Tensor) -> None:
        """Prepare the computation of one token per row. Rows that are not `alive` (R,) attend to
        only one slot."""
        self.used[: self.size] = torch.where(alive, self.length.int() + 1, 1)

    def get_seq_length(self) -> int:
        """The largest possible number of positions before a token."""
        return self._width + self._slots

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        """Store keys and values (R, H_kv, 1, D)."""
        self._layer = layer_idx
        states = key_states, value_states
        for buffer, given in zip(self._own[layer_idx], states, strict=True):
            kept = given.transpose(1, 2).to(self._dtype)
            buffer[: self.size].index_copy_(1, self.length, kept)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Map query (R, H, 1, D) to the output (R, 1, H, D). This step's keys and values are
        already in the buffers."""
        rounded = query[:, :, 0].to(self._dtype)
        scaling, used = options.scaling_of(query), self.used[: self.size]
        keys, values = (x[: self.size].flatten(0, 1) for x in self._own[self._layer])
        own = attend_segments(rounded, keys, values, self._alone, scaling=scaling, used=used)
        output, normalizer = own
        keys, values = self._prompts[self._layer]
        part, more = attend_segments(rounded, keys, values, self._shared, scaling=scaling)
        if gpu_kernels.computes(output):
            return gpu_kernels.merge(output, normalizer, part, more)[:, None]
        share = (more - normalizer).sigmoid().t()[..., None]
        merged = output.to(share.dtype).lerp(part.to(share.dtype), share)
        return merged[:, None].to(value.dtype)


class StaticDecoding:
    """Samples a wave: up to `width` tokens of each of the `active` rows, from the `logits` (R, V)
    that follow their prompts."""

    def __init__(
        self,
        decoder: FusedDecoder,
        cache: StaticCache,
        active: ActiveRows,
        logits: Tensor,
        width: int,
    ) -> None:
        self._decoder, self._cache, self._active, self._width = decoder, cache, active, width
        self._rows, device = len(logits), logits.device
        self._logits = logits.clone()
        # An additional row receives the results of masked rows.
        shape = self._rows + 1, width
        self._tokens = torch.full(shape, -1, device=device)
        self._tokens[self._rows] = 0
        self._policy, self._behavior = torch.zeros(2, *shape, device=device)

    def run(
        self, sampling: Sampling, repeated: Callable[..., GraphedFunction] = CapturedGraph
    ) -> SampledTokens:
        """Return the result of `InProcessEngine._draw`. `repeated` makes a repeatable function from
        a step, its device and a memory pool."""
        device, size = self._logits.device, 0
        stop_text = StopStringMatcher(sampling, self._rows + 1, device)
        looks = 1 if sampling.stop_strings else STEPS_A_LOOK
        draw, compute = self._steps(sampling, repeated)
        for position in range(self._width):
            draw()
            ended = stop_text.update(self._tokens, self._active.index, position)
            if ended is not None:
                self._active.alive &= ~ended
            if position + 1 == self._width:
                break
            if (position + 1) % looks == 0:
                left = self._active.count_unfinished()
                if left == 0:
                    break
                if (size := smaller_size(self._cache.size, left)) < self._cache.size:
                    self._shrink(size, left)
                    draw, compute = self._steps(sampling, repeated)
            compute()
        found = self._tokens, self._policy, self._behavior, stop_text.lengths
        tokens, policy, behavior, lengths = (x[: self._rows] for x in found)
        return tokens, policy, behavior, lengths

    def _steps(
        self, sampling: Sampling, repeated: Callable[..., GraphedFunction]
    ) -> tuple[GraphedFunction, GraphedFunction]:
        device = self._logits.device
        pool = new_pool(device)
        step = partial(self._draw, sampling)
        # Top-p synchronizes with the device to decide whether to sort, so a step with top-p cannot
        # be captured.
        fixed = sampling.greedy or sampling.top_p >= 1.0
        first = repeated(step, device, pool) if fixed else step
        return first, repeated(self._compute, device, pool)

    def _draw(self, sampling: Sampling) -> None:
        """Sample one token of each row."""
        active, length = self._active, self._cache.length
        size = self._cache.size
        drawn = draw(self._logits[:size], active.noise_of(length), sampling, active.seen)
        places = active.index, length.expand(size)
        self._tokens.index_put_(places, drawn.tokens)
        self._policy.index_put_(places, drawn.policy_logprobs)
        self._behavior.index_put_(places, drawn.behavior_logprobs)
        active.advance_in_place(drawn.tokens)

    def _compute(self) -> None:
        """Compute the logits that follow the sampled tokens."""
        active, cache = self._active, self._cache
        cache.see(active.alive)
        logits = self._decoder.forward(active.tokens[:, None], active.positions[:, None], cache)
        self._logits[: cache.size] = logits
        cache.length += 1

    def _shrink(self, size: int, left: int) -> None:
        """Reduce the batch to `size` rows: the `left` unfinished rows, and masked rows."""
        alive = self._active.alive.nonzero()[:, 0]
        order = torch.cat([alive, alive[-1:].expand(size - left)])
        self._cache.keep(order)
        self._active.keep(order)
        self._active.alive[left:] = False
        self._active.index[left:] = self._rows
