"""Sampling tokens: filters, the inverse CDF, stop strings, and collecting completions. All engines
in this process use these functions, so they choose the same tokens from the same logits and
noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from rloo.types import Completion, NumSamples, Prompt, Sampling

# The number of vocabulary entries that the inverse CDF first treats as one block.
_BLOCK = 128
# The number of most likely tokens that top-p tries before it sorts the full vocabulary.
_NUCLEUS = 1024


@dataclass(frozen=True, slots=True)
class SampledIndices:
    """One token per row: tokens int64 (R,), and log-probs of policy and behavior, float32 (R,)."""

    tokens: Tensor
    policy_logprobs: Tensor
    behavior_logprobs: Tensor


def draw(
    logits: Tensor, noise: Tensor, sampling: Sampling, seen: Tensor | None = None
) -> SampledIndices:
    """Sample a token in each row, from logits (R, V) and noise, float64 (R,) in [0, 1). `seen`,
    bool (R, V), is True for tokens of prompt or completion. Only the repetition penalty needs
    it."""
    logits = logits.float()
    if sampling.greedy:
        tokens = logits.argmax(dim=-1)
        return SampledIndices(
            tokens, gather_logprobs(logits, tokens), torch.zeros_like(logits[:, 0])
        )
    scores = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    if not sampling.filtered:
        tokens, logprobs = invert_cdf(scores, noise)
        return SampledIndices(tokens, logprobs, logprobs)
    tokens, behavior_logprobs = invert_cdf(filter_logits(logits, sampling, seen), noise)
    return SampledIndices(tokens, gather_logprobs(scores, tokens), behavior_logprobs)


def gather_logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    """The log-softmax of scores (R, V) at tokens (R,): float32 (R,)."""
    return scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)


def filter_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Scores (R, V) of the behavior distribution; removed tokens have minus infinity. The filters
    are repetition penalty (Keskar et al. 2019), temperature, top-k, top-p (Holtzman et al. 2020)
    and min-p (Nguyen et al. 2024). Order and boundary cases are those of transformers."""
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
        # probability < min_p * highest probability, without computing probabilities
        least = scores.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep a token if the total probability of all more likely tokens is below `top_p`. The most
    likely token is always kept."""
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
    """Tokens int64 (R,) and their log-probs float32 (R,) under the softmax of scores (R, V).

    The token is the first whose cumulative probability exceeds noise * total. No sort is needed:
    probabilities are cumulated in float64, first over blocks of the vocabulary and then within one
    block. A token of probability zero is never chosen. Every token of positive probability can be
    chosen, also the last one.
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
    # The clamps matter only for NaN logits, which `collect_completions` reports.
    block = torch.searchsorted(blocks, target, right=True).clamp_(max=blocks.shape[-1] - 1)
    columns = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    inside = probs.gather(1, columns.clamp(max=size - 1)).masked_fill(columns >= size, 0.0)
    inside = inside.cumsum(dim=-1, dtype=torch.float64)
    # The block's sum was rounded to float32, so the remainder may exceed its float64 sum.
    rest = target - F.pad(blocks, (1, 0)).gather(1, block)
    rest = torch.minimum(rest, inside[:, -1:].nextafter(torch.zeros_like(rest)))
    offset = torch.searchsorted(inside, rest, right=True).clamp_(max=_BLOCK - 1)
    tokens = (block * _BLOCK + offset).clamp_(max=size - 1)
    return tokens[:, 0], probs.gather(1, tokens)[:, 0].log()


def check_request(prompts: Sequence[Prompt], num_samples: int, sampling: Sampling) -> None:
    """Raise ValueError for requests that no engine can sample."""
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
            raise ValueError(f"prompt {prompt.id} has no tokens; a completion needs at least 1")
        if prompt.offset >= sampling.max_tokens:
            raise ValueError(
                f"prompt {prompt.id} has {prompt.offset} tokens of a completion that may have "
                f"{sampling.max_tokens}; there is none left to draw"
            )


def sample_indices(samples: NumSamples, prompts: Sequence[Prompt]) -> Sequence[range]:
    """For each prompt, the range of the numbers k of the completions to sample."""
    return [range(samples)] * len(prompts) if isinstance(samples, int) else samples


def requested_samples(prompts: Sequence[Prompt], usual: int) -> NumSamples:
    """Return the completions to sample for each prompt: `Prompt.num_completions`, or `usual`,
    without those of its pilot, which were sampled before."""
    if all(prompt.num_completions is None for prompt in prompts):
        return usual
    return [range(prompt.pilot or 0, prompt.num_completions or usual) for prompt in prompts]


def refuse_images(prompts: Sequence[Prompt], fact: str) -> None:
    """Raise ValueError for prompts with images; `fact` is the reason and the option to change."""
    for prompt in prompts:
        if prompt.pixels is not None:
            raise ValueError(f"prompt {prompt.id} has images, {fact}")


class StopStringMatcher:
    """Searches the rows of one call for stop strings, token by token."""

    def __init__(self, sampling: Sampling, rows: int, device: torch.device) -> None:
        self._ends: _Ends | None = None
        if sampling.stop_strings:
            assert sampling.decode is not None
            self._ends = _ends_of(sampling.decode, sampling.stop_strings)
        # The number of tokens up to the end of a stop string; max_tokens + 1 if there is none.
        self.lengths: Tensor = torch.full((rows,), sampling.max_tokens + 1, device=device)

    def update(self, tokens: Tensor, index: Tensor, position: int) -> Tensor | None:
        """Whether each of the rows `index` (R',) of tokens (R, max_tokens) contains a stop string
        up to `position`, the position of its last sampled token: bool (R',). None if there are no
        stop strings."""
        if self._ends is None:
            return None
        drawn = tokens[index, position].tolist()
        possible = [n for n, can_end in enumerate(self._ends.possible(drawn)) if can_end]
        if possible:
            rows = index[torch.tensor(possible, device=index.device)]
            begin = max(0, position + 1 - self._ends.window)
            recent = tokens[rows, begin : position + 1].tolist()
            found = torch.tensor(list(map(self._ends.found, recent)), device=index.device)
            lengths = self.lengths[rows]
            self.lengths[rows] = lengths.where(~found, lengths.clamp(max=position + 1))
        return self.lengths[index] <= position + 1


# Decoding returns this for an incomplete character.
_PART = "\N{REPLACEMENT CHARACTER}"


class _Ends:
    """Finds stop strings at the end of tokens, and decodes as few tokens as possible.

    A token can complete a stop string only if the token's text has the last character of a stop
    string. If that character is not ASCII, a text with a part of a character is enough. Decoding
    adds and strips spaces between tokens, so any token can complete a stop string that ends in a
    space. If the tokenizer cleans up spaces, any token can complete any stop string.
    """

    def __init__(self, decode: Callable[[list[list[int]]], list[str]], stops: Sequence[str]):
        self._decode, self._stops = decode, stops
        self._last = {stop[-1] for stop in stops}
        self._any = " " in self._last or _cleans_up(decode)
        if not all(last.isascii() for last in self._last):
            self._last.add(_PART)
        # Characters to decode before the last token. Cleaning up may remove every second character.
        self._needed = 8 + (2 if self._any else 1) * max(map(len, stops))
        # The number of tokens that `found` needs: nearly all have at least a quarter of a
        # character.
        self.window = 8 + 4 * self._needed
        # For each known token: whether it can complete a stop string, and its number of characters.
        self._known: dict[int, tuple[bool, float]] = {}

    def possible(self, tokens: list[int]) -> list[bool]:
        """Whether each of these tokens can complete a stop string."""
        if new := list({token for token in tokens if token not in self._known}):
            for token, text in zip(new, self._decode([[token] for token in new]), strict=True):
                parts = text.count(_PART)
                can_end = self._any or any(last in text for last in self._last)
                self._known[token] = can_end, len(text) - parts + parts / 4
        return [self._known[token][0] for token in tokens]

    def found(self, recent: list[int]) -> bool:
        """Whether a stop string is in the given last tokens of a row."""
        begin, text = len(recent) - 1, 0.0
        self.possible(recent)
        while begin > 0 and text < self._needed:
            begin -= 1
            text += self._known[recent[begin]][1]
        texts = self._decode([recent[begin:]])
        if _PART in texts[0]:  # it may begin inside a character of at most four tokens
            texts += self._decode([recent[start:] for start in range(max(0, begin - 3), begin)])
        return any(stop in text for stop in self._stops for text in texts)


def _cleans_up(decode: Callable[..., list[str]]) -> bool:
    """Whether `decode` is the method of a tokenizer that removes spaces before some words."""
    tokenizer = getattr(decode, "__self__", None)
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    assert tokenizer is not None
    ids = [tokenizer.encode("do n't , he 's .", add_special_tokens=False)]
    return decode(ids) != decode(ids, clean_up_tokenization_spaces=False)  # some ignore this


@lru_cache(maxsize=4)
def _ends_of(decode: Callable[[list[list[int]]], list[str]], stops: tuple[str, ...]) -> _Ends:
    """Return a cached `_Ends`, which knows the tokens of earlier waves and rollouts."""
    return _Ends(decode, stops)


def collect_completions(
    drawn: tuple[Tensor, Tensor, Tensor, Tensor],
    stop_token_ids: Sequence[int],
    limits: Sequence[int],
) -> list[Completion]:
    """Cut each row after its first stop token, at the end of its first stop string, or at its
    limit.

    `drawn` has tokens, policy and behavior log-probs, each (R, W) with arbitrary values after a
    row's end, and the lengths (R,) of `StopStringMatcher`. Raises FloatingPointError if the model's
    logits were NaN.
    """
    tokens, policy, behavior, stop_lengths = drawn
    stops = torch.tensor(stop_token_ids, dtype=tokens.dtype, device=tokens.device)
    stopped = torch.isin(tokens, stops)
    width, limit = tokens.shape[-1], torch.tensor(limits, device=tokens.device)
    by_token = torch.where(stopped.any(dim=-1), stopped.int().argmax(dim=-1) + 1, width + 1)
    whole = torch.minimum(by_token, stop_lengths)
    ended = (whole <= limit).tolist()
    lengths = whole.clamp(max=limit).tolist()
    completions = []
    rows = zip(tokens.tolist(), policy.tolist(), behavior.tolist(), strict=True)
    for row, length, stop in zip(rows, lengths, ended, strict=True):
        ids, policy_logprobs, behavior_logprobs = (values[:length] for values in row)
        if not all(map(math.isfinite, policy_logprobs)):
            raise FloatingPointError(
                "the model's log-probabilities are not finite: its weights have diverged, or its "
                "dtype cannot hold its activations"
            )
        finish = "stop" if stop else "length"
        completions.append(Completion(ids, finish, policy_logprobs, behavior_logprobs))  # type: ignore[arg-type]
    return completions
