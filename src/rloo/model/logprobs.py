"""Computes log-probs and entropies from hidden states, without storing the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.checkpoint import checkpoint

from rloo.kernels import cpu_matmul, gpu_kernels
from rloo.kernels.cpu_matmul import Matrix
from rloo.kernels.fused_lm_head import (
    HasMatrix,
    LogprobRequest,
    blocked_logprobs,
    blocked_scores,
    rows_of,
)
from rloo.kernels.fused_softmax import SoftmaxOutput, collisions, differentiate, select

# The number of logits in a chunk. If there is only one chunk and gradients are enabled, its
# probabilities are stored until the backward (256 MiB in float32, twice that on a GPU). If there
# are several chunks, the backward recomputes them.
CHUNK_ELEMENTS = 2**26
# A GPU's chunks are this many times larger, because each operation on a chunk is a kernel launch.
ON_GPU = 2
# The number of elements processed at a time on a CPU, so that they stay in its cache.
CACHED_ELEMENTS = 2**21

Head = Callable[[Tensor], Tensor]


class TokenScores(NamedTuple):
    """Log-probs and entropies of T completion tokens, both (T,), float32, in nats; the balancing
    loss of the micro-batch, if the model is a mixture of experts and the loss's coefficient is not
    0; and, if requested, the log-probs under the reference and the collision probabilities of the
    tokens' distributions (the sums of squared probabilities), both (T,), without gradients. With
    `kl_estimator` exact, `kl` (T,) is the KL over the vocabulary at the state before each token."""

    logprobs: Tensor
    entropy: Tensor
    balance: Tensor | None
    reference: Tensor | None = None
    collision: Tensor | None = None
    kl: Tensor | None = None


class _SelectLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] and the entropy, forward and backward in place.

    Autograd would store the log-softmax in addition to the logits and allocate a third array in the
    backward. The page faults of new arrays of this size take longer than the arithmetic.
    Probabilities therefore overwrite `logits`, which nothing else uses, a few rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, asked: LogprobRequest) -> Any:
        targets, temperature = asked.targets, asked.temperature
        kept = precise(logits)
        logprobs, entropy, total = (kept.new_empty(len(kept)) for _ in range(3))
        for part in cached_rows(kept):
            rows = SoftmaxOutput(logprobs[part], entropy[part], kept[part], total[part])
            select(kept[part], targets[part], temperature, rows)
            if asked.collision is not None:
                asked.collision[part] = collisions(rows)
        ctx.save_for_backward(kept, targets, entropy, total)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept, targets, entropy, total = ctx.saved_tensors
        increment_version(kept)  # another backward would find gradients there
        of_logprobs, of_entropy = (None if g is None else g / ctx.temperature for g in gradients)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropy)
        for part in cached_rows(kept):
            rows = SoftmaxOutput(entropy[part], entropy[part], kept[part], total[part])
            slope = None if of_entropy is None else of_entropy[part]
            differentiate(rows, targets[part], of_logprobs[part], slope)
        return kept.to(ctx.dtype), None


def cached_rows(logits: Tensor) -> Iterator[slice]:
    """Slices of rows that fit a CPU's cache. On a GPU one slice, since each operation is a kernel
    launch."""
    if logits.device.type == "cuda":
        return iter((slice(0, len(logits)),))
    step = max(1, CACHED_ELEMENTS // logits.shape[-1])
    return (slice(start, start + step) for start in range(0, len(logits), step))


def token_logprobs(
    head: Head, hidden: Tensor, asked: LogprobRequest, *, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """The log-prob of each target and the entropy of its distribution, both (T,), in nats.

    `hidden` (T, D) are the states that predict the targets (T,) of `asked`; `head` maps them to
    logits. Arrays over the vocabulary exist for one chunk of tokens at a time. A chunk has
    `chunk_elements` numbers, on a GPU twice as many. If there are several chunks, the backward
    recomputes them. Both results carry gradients. The collision probabilities, if `asked` has a
    tensor for them, come from the softmax of the same chunk: it is read once more.
    """

    if (matrix := _matrix(head)) is not None:
        return blocked_logprobs(hidden, matrix, asked._replace(rounds=cpu_matmul.rounds()))

    def select_from(hidden_chunk: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        logits, part = head(hidden_chunk), asked.among(place)
        if not gpu_kernels.computes(logits):
            return _SelectLogprobs.apply(logits, part)
        if part.collision is not None:
            part.collision.copy_(gpu_kernels.collisions(logits, part.temperature))
        return gpu_kernels.logprobs(logits, part.targets, part.temperature)

    times = ON_GPU if hidden.device.type == "cuda" else 1
    rows = max(1, times * asked.chunk_elements // vocab_size)
    if hidden.shape[0] <= rows:
        return select_from(hidden, slice(None))
    parts = [
        checkpoint(
            select_from, chunk, slice(number * rows, (number + 1) * rows),
            use_reentrant=False, preserve_rng_state=False,
        )
        for number, chunk in enumerate(hidden.split(rows))
    ]  # fmt: skip
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


@torch.no_grad()
def score_tokens(
    head: Head, hidden: Tensor, targets: Tensor, *, temperature: float, vocab_size: int
) -> Tensor:
    """The log-probs (T,) that `token_logprobs` returns, without entropies and gradients. This takes
    about half the computation."""
    if (matrix := _matrix(head)) is not None:
        return blocked_scores(hidden, matrix, targets, temperature)
    size = rows_of(vocab_size)
    parts = []
    for hidden_chunk, targets_chunk in zip(hidden.split(size), targets.split(size), strict=True):
        logits = head(hidden_chunk)
        if gpu_kernels.computes(logits):
            parts.append(gpu_kernels.logprobs(logits, targets_chunk, temperature)[0])
            continue
        logits = precise(logits)
        parts.append(logits.new_empty(len(logits)))
        select(logits, targets_chunk, temperature, SoftmaxOutput(parts[-1]))
    return torch.cat(parts)


def _matrix(head: Head) -> Matrix | None:
    return head.matrix() if isinstance(head, HasMatrix) else None


def precise(logits: Tensor) -> Tensor:
    """Logits in at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
