"""From hidden states to log-probs and entropies, without keeping the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# The number of logits in a chunk. With gradients, the probabilities of a single chunk are kept
# until the backward (256 MiB in float32); those of several chunks are recomputed there.
CHUNK_ELEMENTS = 2**26
# The number of elements processed at a time, so that they stay in the processor's cache.
CACHED_ELEMENTS = 2**21

Head = Callable[[Tensor], Tensor]


class TokenScores(NamedTuple):
    """Log-probs and entropies of T completion tokens, both (T,), float32, in nats; and the
    balancing loss of the whole micro-batch, for a mixture of experts with a weight for it."""

    logprobs: Tensor
    entropy: Tensor
    balance: Tensor | None


class _SelectLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] and the entropy, forward and backward in place.

    Autograd would keep the log-softmax beside the logits and allocate a third array in the
    backward. New arrays of this size cost more in page faults than the arithmetic, so the
    probabilities overwrite `logits`, which nothing else uses, a few rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Any:
        probabilities = _tempered(logits, temperature)
        logprobs = probabilities.new_empty(len(logits))
        entropy = torch.empty_like(logprobs)
        step = max(1, CACHED_ELEMENTS // logits.shape[-1])
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            scores = probabilities[rows]
            chosen = scores.gather(-1, targets[rows, None])[:, 0]
            weights, normalizer = _normalize(scores)
            logprobs[rows] = chosen - normalizer
            scores.clamp_(min=-1e30)  # 0 * log 0 is 0
            entropy[rows] = normalizer - scores.mul_(weights).sum(dim=-1)
            scores.copy_(weights)
        ctx.save_for_backward(probabilities, targets, entropy)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, targets, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropy)
        scale = of_logprobs / ctx.temperature
        if of_entropy is None:
            gradient = probabilities.mul_(-scale[:, None])
        else:
            gradient = _add_entropy(probabilities, scale, of_entropy / ctx.temperature, entropy)
        gradient.scatter_add_(1, targets[:, None], scale[:, None])
        return gradient.to(ctx.dtype), None, None


def _add_entropy(
    probabilities: Tensor, scale: Tensor, of_entropy: Tensor, entropy: Tensor
) -> Tensor:
    """-p (scale + of_entropy (log p + H)), written over `probabilities`: dH/dz = -p (log p + H)."""
    step = max(1, CACHED_ELEMENTS // probabilities.shape[-1])
    for start in range(0, len(probabilities), step):
        rows = slice(start, start + step)
        part = probabilities[rows]
        # p log p is 0 where p is 0.
        factor = part.clamp(min=torch.finfo(part.dtype).tiny).log_()
        factor.add_(entropy[rows, None]).mul_(of_entropy[rows, None]).add_(scale[rows, None])
        part.mul_(factor.neg_())
    return probabilities


def token_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """The log-prob of each target and the entropy of its distribution, both (T,), in nats.

    `hidden` (T, D) are the states that predict `targets` (T,); `head` maps them to logits. Arrays
    over the vocabulary exist for one chunk of tokens at a time; if there are several chunks, they
    are recomputed in the backward. Both results carry gradients.
    """

    def select(hidden_chunk: Tensor, targets_chunk: Tensor) -> tuple[Tensor, Tensor]:
        return _SelectLogprobs.apply(head(hidden_chunk), targets_chunk, temperature)

    rows = max(1, chunk_elements // vocab_size)
    if hidden.shape[0] <= rows:
        return select(hidden, targets)
    parts = [
        checkpoint(select, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@torch.no_grad()
def score_tokens(
    head: Head, hidden: Tensor, targets: Tensor, *, temperature: float, vocab_size: int
) -> Tensor:
    """Only the log-probs (T,) of `token_logprobs`, without gradients: about half the work."""
    rows = max(1, CACHED_ELEMENTS // vocab_size)
    parts = []
    for hidden_chunk, targets_chunk in zip(hidden.split(rows), targets.split(rows), strict=True):
        scaled = _tempered(head(hidden_chunk), temperature)
        chosen = scaled.gather(-1, targets_chunk[:, None])[:, 0]
        parts.append(chosen - _normalize(scaled)[1])
    return torch.cat(parts)


def _normalize(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores (R, V), and their log-sum-exp (R,), in fewer passes than torch's own: from
    the most likely token's probability, which is never 0."""
    weights = scores.softmax(dim=-1)
    return weights, scores.amax(dim=-1) - weights.amax(dim=-1).log()


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits / temperature in at least float32, in place if the dtype allows it."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return precise.div_(temperature) if temperature != 1.0 else precise
