"""Decoding in C, if the fused decoder's matrices are packed in panels. One call samples many tokens
of all rows. Finished rows leave the batch at once. Their caches are freed when the caches next
grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rloo.engines.counter_rng import uniforms
from rloo.engines.in_process import PromptRow, SampledTokens, limits_of
from rloo.engines.native.packed_prefill import PackedPrompts
from rloo.engines.sampling import StopStringMatcher, draw
from rloo.kernels.decode import CDecoder, DecodingRows, TokenSampling
from rloo.types import Sampling

# Tokens per row and call. Python handles signals between calls. Noise is computed per call.
_STEPS = 16


@dataclass(frozen=True, slots=True)
class PrefilledPrompts:
    """Prefilled prompts: their cache, the logits (P, V) after each prompt, and the index of each
    row's prompt, int64 (R,)."""

    cache: PackedPrompts
    logits: Tensor
    prompt_of: Tensor


def can_decode(sampling: Sampling) -> bool:
    """Whether the C code supports this sampling: greedy, or without filters."""
    return sampling.greedy or not sampling.filtered


def decode(
    model: CDecoder,
    prompts: PrefilledPrompts,
    rows: list[PromptRow],
    keys: Tensor,
    sampling: Sampling,
) -> SampledTokens:
    """Sample completions of `rows` with the noise of `keys` (R,). See `InProcessEngine._draw`."""
    limits = torch.tensor(limits_of(rows, sampling))
    width = int(limits.max())
    tokens = torch.full((len(rows), width), -1)
    logprobs = torch.zeros(len(rows), width)
    first = draw(prompts.logits[prompts.prompt_of], uniforms(keys, 0, 1)[:, 0], sampling)
    tokens[:, 0], logprobs[:, 0] = first.tokens, first.policy_logprobs
    stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long)
    drawing = TokenSampling(
        tokens, logprobs, limits, stops, temperature=sampling.temperature, greedy=sampling.greedy
    )
    wave = DecodingRows(
        model, prompts.cache.take_states(), prompts.cache.lengths, prompts.prompt_of, drawing
    )
    ended = torch.isin(first.tokens, stops) | (limits == 1)
    stop_text = StopStringMatcher(sampling, len(rows), keys.device)
    steps = 1 if sampling.stop_strings else _STEPS
    position, seen = 0, torch.arange(len(rows))
    while True:
        if (by_text := stop_text.update(tokens, seen, position)) is not None:
            ended[seen] |= by_text
        wave.keep(~ended[wave.rows])
        position += 1
        seen = wave.rows.clone()
        few = min(steps, width - position)
        if few <= 0 or len(seen) == 0:
            break
        position += wave.decode(uniforms(keys, position, few), position, few) - 1
    behavior = torch.zeros_like(logprobs) if sampling.greedy else logprobs
    return tokens, logprobs, behavior, stop_text.lengths
