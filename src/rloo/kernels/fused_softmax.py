"""Fused softmax of rows of logits: log-probs of targets, entropies, and the gradient of both. The C
kernels compute these if the kernels are in use, otherwise torch does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rloo.kernels import ops
from rloo.kernels.fused_layers import computes


class SoftmaxOutput(NamedTuple):
    """The outputs of `select` for R rows of V logits: log-probs (R,), entropies (R,), and two
    outputs for the backward: `kept` (R, V), the probabilities up to a factor per row, and `total`
    (R,), the sums of the rows of `kept`. `kept` may be the tensor of the logits."""

    logprobs: Tensor
    entropy: Tensor | None = None
    kept: Tensor | None = None
    total: Tensor | None = None


def select(logits: Tensor, targets: Tensor, temperature: float, rows: SoftmaxOutput) -> None:
    """Fill the tensors in `rows` for targets (R,) under softmax(logits / temperature). The logits
    (R, V) are overwritten with undefined values."""
    if computes(logits) and logits.is_contiguous():
        places = rows.kept, rows.logprobs, rows.entropy, rows.total
        ops.log_softmax(logits, targets, temperature, places)
        return
    if temperature != 1.0:
        logits.div_(temperature)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    # Fewer passes than torch's log_softmax. The normalizer comes from the most likely token, whose
    # probability is never 0.
    weights = logits.softmax(dim=-1)
    normalizer = logits.amax(dim=-1) - weights.amax(dim=-1).log()
    torch.sub(chosen, normalizer, out=rows.logprobs)
    if rows.entropy is not None:
        logits.clamp_(min=-1e30)  # 0 * log 0 is 0
        torch.sub(normalizer, logits.mul_(weights).sum(dim=-1), out=rows.entropy)
    if rows.kept is not None and rows.total is not None:
        rows.kept.copy_(weights)
        rows.total.fill_(1.0)


def collisions(rows: SoftmaxOutput) -> Tensor:
    """Return the sum of the squared probabilities of each row (R,), from `kept` and `total`: the
    collision probability. It reads `kept` once and allocates nothing of its size."""
    assert rows.kept is not None and rows.total is not None
    return (torch.linalg.vector_norm(rows.kept, dim=-1) / rows.total).square()


def differentiate(
    rows: SoftmaxOutput, targets: Tensor, of_logprobs: Tensor, of_entropy: Tensor | None
) -> None:
    """Overwrite `rows.kept` with the gradient of the logits. `of_logprobs` and `of_entropy` (R,)
    are the gradients of log-probs and entropies, already divided by the temperature."""
    kept, total = rows.kept, rows.total
    assert kept is not None and total is not None
    if of_entropy is None:
        if computes(kept) and kept.is_contiguous():
            ops.log_softmax_backward(kept, total, targets, of_logprobs.contiguous())
            return
        kept.mul_((-of_logprobs / total)[:, None])
    else:
        assert rows.entropy is not None
        # dH/dz = -p (log p + H); p log p is 0 where p is 0.
        kept.div_(total[:, None])
        factor = kept.clamp(min=torch.finfo(kept.dtype).tiny).log_()
        factor.add_(rows.entropy[:, None]).mul_(of_entropy[:, None]).add_(of_logprobs[:, None])
        kept.mul_(factor.neg_())
    kept.scatter_add_(1, targets[:, None], of_logprobs[:, None])
