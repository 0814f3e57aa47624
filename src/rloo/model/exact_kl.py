"""The KL of policy and reference over the whole vocabulary, at each state that predicts a token.

The logits of both models exist for one chunk of tokens at a time. A reference is therefore given by
its hidden states and its output head, not by its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.utils.checkpoint import checkpoint

from rloo.model.logprobs import ON_GPU, Head, TokenScores, cached_rows, precise

# Logits of minus infinity become this number: a probability of 0, and 0 * log 0 is 0, not NaN.
_LOWEST = -1e30


class ReferenceStates(NamedTuple):
    """The reference at the states of a micro-batch: hidden states (T, D), and the head that maps
    them to logits (T, V), which the caller overwrites. Neither has gradients."""

    hidden: Tensor
    head: Head


class ScoreRequest(NamedTuple):
    """A request for scores of `targets` (T,) at a temperature. Logits of policy and reference
    together have at most `chunk_elements` numbers at a time, on a GPU twice as many."""

    targets: Tensor
    temperature: float
    vocab_size: int
    chunk_elements: int


class _Compare(torch.autograd.Function):
    """Log-probs, entropy and KL of rows of logits, and the reference's log-probs, all (R,).

    The logits (R, V) of policy and reference, which nothing else uses, are overwritten: with the
    policy's log-probs and with its log-ratios to the reference, and in the backward with the
    gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, reference: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, ...]:
        logs, ratios = precise(logits), precise(reference)
        found = tuple(logs.new_empty(len(logs)) for _ in range(4))
        for part in cached_rows(logs):
            chosen, entropy, kl, theirs = (x[part] for x in found)
            for values, place in ((logs[part], chosen), (ratios[part], theirs)):
                _log_softmax(values, temperature)
                torch.gather(values, -1, targets[part, None], out=place[:, None])
            weights = logs[part].exp()
            torch.sub(logs[part], ratios[part], out=ratios[part])
            torch.linalg.vecdot(weights, logs[part], out=entropy).neg_()
            torch.linalg.vecdot(weights, ratios[part], out=kl)
        ctx.save_for_backward(logs, ratios, targets, *found[1:3])
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(found[3])
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logs, ratios, targets, entropy, kl = ctx.saved_tensors
        increment_version((logs, ratios))  # another backward would find gradients there
        of_chosen, of_entropy, of_kl = (
            None if g is None else (g / ctx.temperature)[:, None] for g in gradients[:3]
        )
        if of_chosen is None:
            of_chosen = torch.zeros_like(kl)[:, None]
        for part in cached_rows(logs):
            # dKL/dz = p (log p/q - KL), dH/dz = -p (log p + H), of the scaled logits z.
            slope = ratios[part]
            if of_kl is None:
                slope.zero_()
            else:
                slope.sub_(kl[part, None]).mul_(of_kl[part])
            if of_entropy is not None:
                slope.sub_((logs[part] + entropy[part, None]).mul_(of_entropy[part]))
            slope.sub_(of_chosen[part])
            logs[part].exp_().mul_(slope)
            logs[part].scatter_add_(1, targets[part, None], of_chosen[part])
        return logs.to(ctx.dtype), None, None, None


def exact_scores(
    head: Head, hidden: Tensor, reference: ReferenceStates, asked: ScoreRequest
) -> TokenScores:
    """The log-probs of the targets, the entropies, and the KL(policy || reference) of each state,
    all (T,), in nats, with gradients if they are enabled; and the reference's log-probs.

    `hidden` (T, D) are the policy's states, which `head` maps to logits. If there are several
    chunks, the backward recomputes them."""

    def compare(hidden: Tensor, theirs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            other = reference.head(theirs)
        found: tuple[Tensor, ...] = _Compare.apply(head(hidden), other, targets, asked.temperature)
        return found

    times = ON_GPU if hidden.device.type == "cuda" else 1
    rows = max(1, times * asked.chunk_elements // (2 * asked.vocab_size))
    given = hidden, reference.hidden, asked.targets
    if len(hidden) <= rows:
        found = compare(*given)
    else:
        parts = [
            checkpoint(compare, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(x.split(rows) for x in given), strict=True)
        ]
        found = tuple(map(torch.cat, zip(*parts, strict=True)))
    logprobs, entropy, kl, theirs = found
    return TokenScores(logprobs, entropy, None, theirs, kl)


def _log_softmax(logits: Tensor, temperature: float) -> None:
    """Overwrite logits (R, V) with log softmax(logits / temperature)."""
    if temperature != 1.0:
        logits.div_(temperature)
    logits.clamp_(min=_LOWEST)
    logits.sub_(logits.logsumexp(-1, keepdim=True))
