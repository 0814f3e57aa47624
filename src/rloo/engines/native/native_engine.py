"""The native engine: the model with the cache and attention of this package. `fused_decoder.py`
computes the model if the architecture is supported, otherwise the Hugging Face module does.

Each prompt is prefilled once. Its keys and values are stored once, and read once per step for all
of its completions. A step decodes one token of every row, and finished rows are removed. Rows of a
later turn of an episode are resumed from their caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo.engines.in_process import (
    InProcessEngine,
    PromptRow,
    SampledTokens,
    cache_bytes_per_token,
    limits_of,
    pad_left,
)
from rloo.engines.native import c_decoding, static_decoding
from rloo.engines.native.cuda_graphs import CapturedGraph
from rloo.engines.native.fused_decoder import FusedDecoder, can_fuse
from rloo.engines.native.kv_cache import DecodeCache, PromptCache, fill_holes
from rloo.engines.native.packed_prefill import PackedPrompts
from rloo.engines.native.prefix_cache import PrefixCache
from rloo.engines.native.running_rows import ActiveRows
from rloo.engines.native.static_decoding import StaticCache, StaticDecoding
from rloo.engines.sampling import StopStringMatcher, draw
from rloo.kernels.decode import CDecoder, filled_up, filling
from rloo.kernels.fused_layers import CACHES
from rloo.model import attention
from rloo.types import Completion, NumSamples, Prompt, Sampling, Weights

# The number of prompt tokens in one prefill forward, including padding.
PREFILL_TOKENS = 4096
# The largest number of scores (queries times keys) of one head when rows are resumed.
_SCORES = 1024 * PREFILL_TOKENS
# Finished rows are removed when they are at least this share of the active rows.
_COMPACTION_SHARE = 1 / 16


class NativeEngine(InProcessEngine):
    """Samples with the policy's weights. `support` checks whether the engine can run a model. The
    fused decoder computes matrix products in `dtype` (None: the model's) and copies some weights.
    With `fused=False` the module is always used. Keys and values have the type `cache_dtype`. By
    default they have 16 bits on a GPU if products and training's attention have 16 bits, otherwise
    at least float32. Other `options`: see `InProcessEngine`."""

    name = "native"
    default_cache_bytes = 4 << 30
    # The class that repeats a step of fixed shapes.
    repeated = CapturedGraph

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        fused: bool = True,
        cache_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if model.config._attn_implementation != attention.IMPLEMENTATION:
            attention.install(model)
        fuses = fused and can_fuse(model)
        named = inspect.signature(model.forward).parameters
        self._name_of_cache = next((name for name in CACHES if name in named), CACHES[-1])
        self._decoder = FusedDecoder(model, dtype or model.dtype) if fuses else None
        self._model_in_c: CDecoder | None = None
        self._keeps = False
        self._kept: PrefixCache | None = None
        precision = options.get("precision")
        if cache_dtype is None and model.device.type == "cuda" and dtype in (None, precision):
            cache_dtype = precision
        self.cache_dtype = cache_dtype
        if self._decoder is not None:
            self._decoder.compiles = cache_dtype == (dtype or model.dtype)
        super().__init__(model, copies_weights=self._decoder is not None, **options)

    @contextmanager
    def prefix_caching(self) -> Iterator[None]:
        """See `rloo.types.PrefixCaching`. The engine stores the caches of a call's last wave."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps, self._kept = False, None

    def load(self, weights: Weights, version: int) -> None:
        """Load the policy's weights. Without the fused decoder no weights are copied."""
        if version != self.version:
            self._kept = None
        if self._decoder is not None and version != self.version:
            self.version: int = -1  # until all weights are loaded
            self._load(weights())
        self.version = version

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert self._decoder is not None
        self._model_in_c = None  # frees the old matrices before new ones are made
        self._decoder.load(weights)
        self._model_in_c = self._decoder.in_c()
        if self._model_in_c is not None:
            bare = cache_bytes_per_token(self._model, self.cache_dtype)
            self._count_rows(filled_up(bare, self._decoder.head_size), filling())

    @property
    def hidden_bytes(self) -> int:
        """Bytes of weights that torch's allocation statistics do not count."""
        return 0 if self._decoder is None else self._decoder.hidden_bytes()

    def sample(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[list[Completion]]:
        """See `rloo.types.Engine`. Before the first `load` the engine samples with the model's
        weights."""
        if self._decoder is not None and self.version < 0:
            self._load(self._model.named_parameters())
        return super().sample(prompts, samples, sampling, noise)

    def _at_once(self, rows: list[PromptRow], sampling: Sampling) -> int:
        # The caches of resumed rows were counted when the rows started.
        if self._kept is not None and self._kept.has(rows, sampling):
            return len(rows)
        return super()._at_once(rows, sampling)

    def _draw(self, rows: list[PromptRow], keys: Tensor, sampling: Sampling) -> SampledTokens:
        device = keys.device
        if self._model_in_c is not None and not self._keeps and c_decoding.can_decode(sampling):
            return self._draw_in_c(self._model_in_c, rows, keys, sampling)
        if (found := self._draw_repeating(rows, keys, sampling)) is not None:
            return found
        decode, logits, shared = self._start(rows, sampling)
        width = max(limits_of(rows, sampling))
        active = ActiveRows(rows, keys, sampling, vocabulary=logits.shape[-1])
        tokens = torch.full((len(rows), width), -1, device=device)
        policy, behavior = torch.zeros(2, *tokens.shape, device=device)
        stop_text = StopStringMatcher(sampling, len(rows), device)
        for position in range(width):
            drawn = draw(logits, active.noise_at(position), sampling, active.seen)
            tokens[active.index, position] = drawn.tokens
            policy[active.index, position] = drawn.policy_logprobs
            behavior[active.index, position] = drawn.behavior_logprobs
            ended = stop_text.update(tokens, active.index, position)
            if position + 1 == width:
                break
            active.advance(drawn.tokens, ended)
            left = active.count_unfinished()
            if left == 0:
                break
            finished = len(active.index) - left
            if finished and finished >= _COMPACTION_SHARE * len(active.index):
                order = fill_holes(active.alive)
                decode.keep(order)
                active.keep(order)
            decode.expect(1)
            logits = self._forward(active.tokens[:, None], active.positions[:, None], decode)
        if self._keeps:
            self._kept = PrefixCache(decode, rows, tokens, shared, sampling.max_tokens)
        return tokens, policy, behavior, stop_text.lengths

    def _draw_in_c(
        self, model: CDecoder, rows: list[PromptRow], keys: Tensor, sampling: Sampling
    ) -> SampledTokens:
        """The result of `_draw`, computed by `c_decoding`."""
        assert self._decoder is not None
        prompts, numbers = _prompts_of(rows)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        cache, logits = PackedPrompts(lengths), []
        for part in _in_parts(lengths):
            token_ids = [token for prompt in prompts[part] for token in prompt.token_ids]
            positions, ends = cache.begin(lengths[part])
            input_ids = torch.tensor(token_ids)[None]
            logits.append(self._decoder.forward(input_ids, positions, cache, ends))
        limit = max(lengths) + sampling.max_tokens
        model.rotate_by(self._decoder.rotations(limit)[:limit])
        prefilled = c_decoding.PrefilledPrompts(cache, torch.cat(logits), torch.tensor(numbers))
        return c_decoding.decode(model, prefilled, rows, keys, sampling)

    def _draw_repeating(
        self, rows: list[PromptRow], keys: Tensor, sampling: Sampling
    ) -> SampledTokens | None:
        """The result of `_draw`, computed by `static_decoding`. None if the wave is not
        supported."""
        decoder, device = self._decoder, keys.device
        if (
            decoder is None
            or self._keeps
            or not static_decoding.can_decode(self.cache_dtype, decoder, device)
        ):
            return None
        prompts, numbers = _prompts_of(rows)
        if numbers != sorted(numbers):
            return None
        cache, logits = self._prefill(prompts)
        prompt_of_row, width = torch.tensor(numbers, device=device), max(limits_of(rows, sampling))
        active = ActiveRows(rows, keys, sampling, vocabulary=logits.shape[-1])
        fixed = StaticCache(cache, prompt_of_row, width)
        decoding = StaticDecoding(decoder, fixed, active, logits[prompt_of_row], width)
        return decoding.run(sampling, self.repeated)

    def _start(
        self, rows: list[PromptRow], sampling: Sampling
    ) -> tuple[DecodeCache, Tensor, list[int]]:
        """The cache with all tokens of the rows, the logits (R, V) that follow them, and the number
        of each row's tokens in the prompt cache."""
        kept, self._kept = self._kept, None
        if kept is not None and kept.has(rows, sampling):
            return self._go_on(kept, rows, sampling)
        del kept  # its caches may be as large as the new ones
        device = self._model.device
        prompts, numbers = _prompts_of(rows)
        prompt_of_row = torch.tensor(numbers, device=device)
        cache, logits = self._prefill(prompts)
        width = max(limits_of(rows, sampling))
        decode = DecodeCache(cache, prompt_of_row, max_tokens=width, kept=self._keeps)
        return decode, logits[prompt_of_row], [len(prompt.token_ids) for prompt, _ in rows]

    def _go_on(
        self, kept: PrefixCache, rows: list[PromptRow], sampling: Sampling
    ) -> tuple[DecodeCache, Tensor, list[int]]:
        """Return the result of `_start`. Only tokens that are not in the cache are computed."""
        rest, cache = kept.resume(rows, sampling, self._pad_token_id), kept.cache
        count, width = rest.input_ids.shape
        slots = max(len(prompt.token_ids) for prompt, _ in rows)
        size = max(1, min(PREFILL_TOKENS, _SCORES // slots) // count)
        for start in range(0, width, size):
            part = slice(start, min(start + size, width))
            columns = part.stop - start
            cache.expect(columns, (rest.pads - start).clamp_(0, columns))
            logits = self._forward(rest.input_ids[:, part], rest.positions[:, part], cache)
        return cache, logits, rest.shared

    def _prefill(self, prompts: list[Prompt]) -> tuple[PromptCache, Tensor]:
        """The prompts' keys and values, and the logits (P, V) that follow each prompt."""
        device = self._model.device
        longest = max(len(prompt.token_ids) for prompt in prompts)
        cache = PromptCache(len(prompts), longest, self.cache_dtype)
        logits = []
        size = max(1, PREFILL_TOKENS // longest)
        for start in range(0, len(prompts), size):
            part = [prompt.token_ids for prompt in prompts[start : start + size]]
            input_ids, pads = pad_left(part, self._pad_token_id, device)
            width = input_ids.shape[1]
            cache.begin(start, pads, width)
            positions = torch.arange(width, device=device)[None, :] - pads[:, None]
            logits.append(self._forward(input_ids, positions.clamp_(min=0), cache))
        return cache, torch.cat(logits)

    def _forward(
        self, input_ids: Tensor, position_ids: Tensor, cache: PromptCache | DecodeCache
    ) -> Tensor:
        if self._decoder is not None:
            return self._decoder.forward(input_ids, position_ids, cache)
        output = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention.no_mask(input_ids.device),
            use_cache=True,
            logits_to_keep=1,
            rloo_layout=cache,
            **{self._name_of_cache: cache},
        )
        return output.logits[:, -1]


def _in_parts(lengths: list[int]) -> Iterator[slice]:
    """Yield slices of consecutive prompts that have at most PREFILL_TOKENS tokens in total. A
    longer prompt is a separate slice."""
    start = total = 0
    for number, length in enumerate(lengths):
        if number > start and total + length > PREFILL_TOKENS:
            yield slice(start, number)
            start, total = number, 0
        total += length
    yield slice(start, len(lengths))


def _prompts_of(rows: list[PromptRow]) -> tuple[list[Prompt], list[int]]:
    """The distinct prompts, and the index of each row's prompt."""
    prompts = list({id(prompt): prompt for prompt, _ in rows}.values())
    number = {id(prompt): index for index, prompt in enumerate(prompts)}
    return prompts, [number[id(prompt)] for prompt, _ in rows]
