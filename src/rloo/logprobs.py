"""From hidden states to log-probabilities and entropies, without keeping logits of all tokens.

Knows nothing of the model but its output head, called as a function on a chunk of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits of a chunk, in elements: 128 MiB in float32.
CHUNK_ELEMENTS = 2**25


class _SelectLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] with a backward that needs one copy of the logits.

    Autograd's own keeps the log-softmax besides the logits and makes a third array in the backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Any:
        scaled = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        # `logits` is this function's alone, so it is used up: fresh arrays of this size cost more
        # in page faults than the arithmetic.
        scaled = scaled.div_(temperature) if temperature != 1.0 else scaled
        normaliser = scaled.logsumexp(dim=-1)
        shifted = scaled.sub_(normaliser[:, None])
        logprobs = shifted.gather(-1, targets[:, None])[:, 0]
        probabilities = shifted.exp()
        entropy = -torch.linalg.vecdot(probabilities, shifted.clamp_(min=-1e30))
        ctx.save_for_backward(probabilities, targets)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        probabilities, targets = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        gradient = probabilities.mul_(-scale[:, None])
        gradient.scatter_add_(1, targets[:, None], scale[:, None])
        return gradient.to(ctx.dtype), None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, both (T,), in nats.

    `hidden` (T, D) are the states that predict `targets` (T,); `head` makes logits of them. The
    vocabulary-sized arrays exist for one chunk of tokens at a time: more than one chunk is
    recomputed in the backward. The entropy carries no gradient.
    """

    def chunk_logprobs(hidden_chunk: Tensor, targets_chunk: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _SelectLogprobs.apply(
            head(hidden_chunk), targets_chunk, temperature
        )
        return result

    rows = max(1, chunk_elements // vocab_size)
    if hidden.shape[0] <= rows:
        return chunk_logprobs(hidden, targets)
    parts = []
    for start in range(0, hidden.shape[0], rows):
        chunk = hidden[start : start + rows], targets[start : start + rows]
        if torch.is_grad_enabled():
            parts.append(checkpoint(chunk_logprobs, *chunk, use_reentrant=False))
        else:
            parts.append(chunk_logprobs(*chunk))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
