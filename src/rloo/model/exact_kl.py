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

from rloo.kernels.fused_softmax import SoftmaxOutput, collisions, select
from rloo.model.logprobs import (
    CACHED_ELEMENTS,
    ON_GPU,
    Head,
    TokenScores,
    cached_rows,
    precise,
)

# On a CPU, the minimum rows of a chunk that the backward recomputes.
_MIN_ROWS = 128


class ReferenceStates(NamedTuple):
    """The reference at the states of a micro-batch: hidden states (T, D), and the head that maps
    them to logits (T, V), which the caller overwrites. Neither has gradients."""

    hidden: Tensor
    head: Head


class ScoreRequest(NamedTuple):
    """A request for scores of `targets` (T,) at a temperature. Logits of policy and reference
    together have at most `chunk_elements` numbers at a time, on a GPU twice as many. On a CPU they
    have fewer if there are several chunks. `collision`: whether to compute the collision
    probabilities, too."""

    targets: Tensor
    temperature: float
    vocab_size: int
    chunk_elements: int
    collision: bool = False


class _Compare(torch.autograd.Function):
    """Log-probs, entropy and KL of rows of logits, the reference's log-probs, and the collision
    probabilities if requested, all (R,).

    The logits (R, V) of policy and reference, which nothing else uses, are overwritten: with the
    policy's probabilities up to a factor and with the difference of the logits, and in the backward
    with the gradient. The KL is the mean difference minus that of the normalizers."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, reference: Tensor, targets: Tensor, asked: ScoreRequest
    ) -> tuple[Tensor, ...]:
        kept, above = precise(logits), precise(reference)
        logprobs, entropy, theirs, total = (kept.new_empty(len(kept)) for _ in range(4))
        mean, difference = torch.empty_like(total), torch.empty_like(total)
        collision, temperature = torch.empty_like(total), asked.temperature
        for part in cached_rows(kept):
            other, chosen = above[part].clone(), targets[part]
            torch.sub(kept[part], above[part], out=above[part])
            above[part].nan_to_num_(nan=0.0)  # of tokens that are impossible in both models
            difference[part] = above[part].gather(-1, chosen[:, None])[:, 0]
            select(other, chosen, temperature, SoftmaxOutput(theirs[part]))
            rows = SoftmaxOutput(logprobs[part], entropy[part], kept[part], total[part])
            select(kept[part], chosen, temperature, rows)
            if asked.collision:
                collision[part] = collisions(rows)
            torch.linalg.vecdot(kept[part], above[part], out=mean[part])
        mean.div_(total * temperature)
        kl = mean - difference / temperature + (logprobs - theirs)
        ctx.save_for_backward(kept, above, targets, entropy, total, mean)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.mark_non_differentiable(theirs, collision)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, kl, theirs, collision

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, above, targets, entropy, total, mean = ctx.saved_tensors
        increment_version((kept, above))  # another backward would find gradients there
        of_chosen, of_entropy, of_kl = (
            torch.zeros_like(mean) if g is None else g / ctx.temperature for g in gradients[:3]
        )
        factor = of_kl / (ctx.temperature * total)
        constant = -(of_kl * mean + of_chosen) / total
        for part in cached_rows(kept):
            # dKL/dz = p (log p/q - KL), dH/dz = -p (log p + H), for the scaled logits z.
            slope = above[part].mul_(factor[part, None]).add_(constant[part, None])
            if gradients[1] is not None:
                logs = (kept[part] / total[part, None]).clamp_(min=torch.finfo(kept.dtype).tiny)
                logs.log_().add_(entropy[part, None])
                slope.sub_(logs.mul_((of_entropy / total)[part, None]))
            kept[part].mul_(slope)
            kept[part].scatter_add_(1, targets[part, None], of_chosen[part, None])
        return kept.to(ctx.dtype), None, None, None


def exact_scores(
    head: Head, hidden: Tensor, reference: ReferenceStates, asked: ScoreRequest
) -> TokenScores:
    """The log-probs of the targets, the entropies, and the KL(policy || reference) of each state,
    all (T,), in nats, with gradients if they are enabled; the reference's log-probs; and the
    collision probabilities if requested.

    `hidden` (T, D) are the policy's states, which `head` maps to logits. If there are several
    chunks, the backward recomputes them."""

    def compare(hidden: Tensor, theirs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            other = reference.head(theirs)
        found: tuple[Tensor, ...] = _Compare.apply(head(hidden), other, targets, asked)
        return found

    rows = max(1, asked.chunk_elements // (2 * asked.vocab_size))
    if hidden.device.type == "cuda":
        rows *= ON_GPU
    elif len(hidden) > rows:  # nothing is stored, so that less memory suffices
        rows = min(rows, max(_MIN_ROWS, CACHED_ELEMENTS // asked.vocab_size))
    given = hidden, reference.hidden, asked.targets
    if len(hidden) <= rows:
        found = compare(*given)
    else:
        parts = [
            checkpoint(compare, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(x.split(rows) for x in given), strict=True)
        ]
        found = tuple(map(torch.cat, zip(*parts, strict=True)))
    logprobs, entropy, kl, theirs, collision = found
    return TokenScores(logprobs, entropy, None, theirs, collision if asked.collision else None, kl)
