"""Drawing tokens: the noise, the filters, the inverse CDF, and what becomes of the drawn tokens.

Every engine that runs in this process draws here, so that two engines given the same logits and
the same noise choose the same tokens. Knows nothing of models, caches or prompts' text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.types import Completion, Prompt, Sampling

# Columns of the vocabulary that the inverse CDF first looks at as one.
_BLOCK = 128
# How many of the most likely tokens top-p tries before it sorts the whole vocabulary.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row: tokens int64 (R,), both log-probabilities float32 (R,)."""

    tokens: Tensor
    policy_logprobs: Tensor
    sampling_logprobs: Tensor


def draw(logits: Tensor, noise: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Draw:
    """Choose a token in each row.

    logits (R, V), noise float64 (R,) in [0, 1), seen bool (R, V): True where the token stands in
    the row's prompt or completion (needed for the repetition penalty only).
    """
    logits = logits.float()
    if sampling.greedy:
        tokens = logits.argmax(dim=-1)
        return Draw(tokens, gather_logprobs(logits, tokens), torch.zeros_like(logits[:, 0]))
    scores = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    if not sampling.filtered:
        tokens, logprobs = invert_cdf(scores, noise)
        return Draw(tokens, logprobs, logprobs)
    tokens, sampling_logprobs = invert_cdf(filter_logits(logits, sampling, seen), noise)
    return Draw(tokens, gather_logprobs(scores, tokens), sampling_logprobs)


def gather_logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    """float32 (R,): log-softmax of scores (R, V) at tokens (R,)."""
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Scores (R, V) of the distribution that is really sampled; minus infinity where removed.

    Repetition penalty (Keskar et al. 2019), temperature, top-k, top-p (Holtzman et al. 2020), min-p
    (Nguyen et al. 2024), in the order and with the boundary cases of transformers.
    """
    scores = logits
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "the repetition penalty needs the tokens seen"
        penalty = sampling.repetition_penalty
        scores = torch.where(
            seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores
        )
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    if sampling.top_k > 0:
        kept = scores.topk(min(sampling.top_k, scores.shape[-1]), dim=-1).values
        scores = scores.masked_fill(scores < kept[:, -1:], -math.inf)
    if sampling.top_p < 1.0:
        scores = _keep_nucleus(scores, sampling.top_p)
    if sampling.min_p > 0.0:
        # prob < min_p * prob of the best, without computing probabilities
        least = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep a token while the tokens more likely than it hold under `top_p`; always the first."""
    probs = scores.softmax(dim=-1)
    best, columns = probs.topk(min(_NUCLEUS, scores.shape[-1]), dim=-1)
    before = best.cumsum(dim=-1) - best
    if best.shape[-1] < scores.shape[-1] and bool((before[:, -1] < top_p).any()):
        best, columns = probs.sort(dim=-1, descending=True)
        before = best.cumsum(dim=-1) - best
    keep = before < top_p
    keep[:, 0] = True
    removed = torch.ones_like(scores, dtype=torch.bool).scatter_(1, columns, ~keep)
    return scores.masked_fill(removed, -math.inf)


def invert_cdf(scores: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 (R,) and their log-probabilities float32 (R,) under softmax of scores (R, V).

    The token is the first whose cumulated probability exceeds noise * total. No sorting; the
    vocabulary is cumulated in blocks, in float64, so that rare tokens keep their probability. A
    token of probability zero is never chosen, and the last one of positive probability can be.
    """
    size = scores.shape[-1]
    probs = scores.softmax(dim=-1)
    whole = size - size % _BLOCK
    sums = probs[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(dim=-1)
    if whole < size:
        sums = torch.cat([sums, probs[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    blocks = sums.cumsum(dim=-1, dtype=torch.float64)
    total = blocks[:, -1:]
    target = noise[:, None] * total
    # The clamps matter for logits that are not numbers only; `collect_completions` reports those.
    block = torch.searchsorted(blocks, target, right=True).clamp_(max=blocks.shape[-1] - 1)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    inside = probs.gather(1, columns.clamp(max=size - 1)).masked_fill(columns >= size, 0.0)
    inside = inside.cumsum(dim=-1, dtype=torch.float64)
    # The block's sum was rounded to float32: the rest may lie beyond its float64 sum.
    rest = target - F.pad(blocks, (1, 0)).gather(1, block)
    rest = torch.minimum(rest, inside[:, -1:].nextafter(torch.zeros_like(rest)))
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    tokens = (block * _BLOCK + offset).clamp_(max=size - 1)
    return tokens[:, 0], probs.gather(1, tokens)[:, 0].log()


def check_request(prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> None:
    """Refuse, with a ValueError, what no engine can sample."""
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; an engine needs at least 1")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens is {sampling.max_tokens}; a completion has at least 1 token")
    if sampling.temperature <= 0.0 and not sampling.greedy:
        raise ValueError(
            f"temperature is {sampling.temperature}; it must be above 0 (greedy=True takes the "
            "most likely token)"
        )
    if sampling.stop_strings and sampling.decode is None:
        raise ValueError("there are stop_strings but no decode; an engine knows tokens, not text")
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.id} has no tokens; a model needs at least 1 to go on")


class StopText:
    """Looks for the stop strings in the rows of one call, token after token."""

    def __init__(self, sampling: Sampling, rows: int, device: torch.device) -> None:
        # A token has at least one byte of text; a few more, as some (a leading space) have none.
        self._window = 8 + max((len(s.encode()) for s in sampling.stop_strings), default=0)
        self._sampling = sampling
        # Tokens up to the one that completed a stop string; more than there can be for none.
        self.lengths = torch.full((rows,), sampling.max_tokens + 1, device=device)

    def see(self, tokens: Tensor, index: Tensor, position: int) -> Tensor | None:
        """bool (R',): whether the rows `index` (R',) of tokens (R, max_tokens), known up to
        `position`, have come to a stop string now or before; None where there are none."""
        if not self._sampling.stop_strings:
            return None
        assert self._sampling.decode is not None
        begin = max(0, position + 1 - self._window)
        texts = self._sampling.decode(tokens[index, begin : position + 1].tolist())
        found = torch.tensor(
            [any(stop in text for stop in self._sampling.stop_strings) for text in texts],
            device=index.device,
        )
        lengths = self.lengths[index]
        self.lengths[index] = lengths.where(~found, lengths.clamp(max=position + 1))
        return self.lengths[index] <= position + 1


def collect_completions(
    drawn: tuple[Tensor, Tensor, Tensor, Tensor], stop_token_ids: Sequence[int]
) -> list[Completion]:
    """Cut each row after its first stop token, or where it came to a stop string.

    drawn: tokens, policy and sampling log-probabilities, each (R, max_tokens), and `StopText`'s
    lengths (R,); behind the end anything may stand. Raises FloatingPointError where the model's
    logits were not numbers.
    """
    tokens, policy, behavior, stop_lengths = drawn
    stops = torch.tensor(stop_token_ids, dtype=tokens.dtype, device=tokens.device)
    stopped = torch.isin(tokens, stops)
    limit = tokens.shape[-1]
    by_token = torch.where(stopped.any(dim=-1), stopped.int().argmax(dim=-1) + 1, limit + 1)
    whole = torch.minimum(by_token, stop_lengths)
    ended = (whole <= limit).tolist()
    lengths = whole.clamp(max=limit).tolist()
    completions = []
    for row, length, stop in zip(
        zip(tokens.tolist(), policy.tolist(), behavior.tolist(), strict=True),
        lengths,
        ended,
        strict=True,
    ):
        ids, policy_logprobs, sampling_logprobs = (values[:length] for values in row)
        if not all(map(math.isfinite, policy_logprobs)):
            raise FloatingPointError(
                "the model's log-probabilities are not finite: its weights have diverged, or its "
                "dtype cannot hold its activations"
            )
        finish = "stop" if stop else "length"
        completions.append(Completion(ids, finish, policy_logprobs, sampling_logprobs))  # type: ignore[arg-type]
    return completions
