"""The output head fused with the log-probs of tokens. A block of rows is computed at a time, so
that logits are read while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from rloo.kernels import cpu_matmul
from rloo.kernels.bf16_rounding import in_float32, operands, round_in_place, rounded_layer
from rloo.kernels.cpu_matmul import Matrix
from rloo.kernels.fused_softmax import SoftmaxOutput, collisions, differentiate, select

# The number of elements processed at a time, so that they stay in the processor's cache.
CACHED_ELEMENTS = 2**21
# The minimum rows of a block. With fewer rows a product is slow for every vocabulary size.
_MIN_ROWS = 256


@runtime_checkable
class HasMatrix(Protocol):
    """A head that can return its matrix (V, D) and optional bias (V,)."""

    def matrix(self) -> Matrix | None:
        """Matrix and bias, or None if the logits are not only hidden @ matrix.T + bias."""


class LogprobRequest(NamedTuple):
    """A request for the log-probs of `targets` (T,) at a temperature, given hidden states (T, D).
    If there are at most `chunk_elements` logits, their softmax is stored for the backward.
    Otherwise it is recomputed in the backward. With `rounds`, products have rounded operands
    (`bf16_rounding`). `collision` (T,) receives the sums of squared probabilities, if given."""

    targets: Tensor
    temperature: float
    chunk_elements: int
    rounds: bool = False
    collision: Tensor | None = None

    def among(self, rows: slice) -> LogprobRequest:
        """The request for some of the rows."""
        collision = None if self.collision is None else self.collision[rows]
        return self._replace(targets=self.targets[rows], collision=collision)


class _BlockedLogprobs(torch.autograd.Function):
    """Log-probs and entropies (T,) from hidden states (T, D) and the head's matrix."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, asked: LogprobRequest
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        given = weight, bias
        if asked.rounds:
            hidden, weight, bias = operands(hidden, weight, bias)
        kept, size = _room(hidden, weight, asked)
        logprobs, entropy, total = (hidden.new_empty(len(hidden)) for _ in range(3))
        for part in _blocks(len(hidden), size):
            place = _place(kept, part, hidden)
            logits = product(hidden[part], weight, bias, place)
            rows = SoftmaxOutput(logprobs[part], entropy[part], place, total[part])
            select(logits, asked.targets[part], asked.temperature, rows)
            if asked.collision is not None:
                asked.collision[part] = collisions(rows)
        all_kept = kept if len(kept) == len(hidden) else None
        ctx.save_for_backward(hidden, *given, entropy, total, all_kept)
        ctx.asked, ctx.size = asked, size
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, entropy, total, kept = ctx.saved_tensors
        targets, temperature, _, rounds, _ = ctx.asked
        if rounds:
            weight, bias = rounded_layer(weight, bias)
        of_logprobs, of_entropy = (None if g is None else g / temperature for g in gradients)
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(entropy)
        wanted = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight) if wanted[1] else None
        of_bias = torch.zeros_like(bias) if wanted[2] else None
        again = kept is None
        if again:
            kept = hidden.new_empty(min(ctx.size, len(hidden)), len(weight))
        else:
            increment_version(kept)  # another backward would find gradients there
        for part in _blocks(len(hidden), ctx.size):
            block = _place(kept, part, hidden)
            rows = SoftmaxOutput(torch.empty_like(total[part]), entropy[part], block, total[part])
            if again:
                logits = product(hidden[part], weight, bias, block)
                select(logits, targets[part], temperature, rows._replace(entropy=None))
            slope = None if of_entropy is None else of_entropy[part]
            differentiate(rows, targets[part], of_logprobs[part], slope)
            if rounds:
                round_in_place(block)
            if of_hidden is not None:
                _multiply_back(block, weight, of_hidden[part])
            if of_weight is not None:
                add_outer(of_weight, hidden[part], block)
            if of_bias is not None:
                of_bias += block.sum(0)
        return of_hidden, of_weight, of_bias, None


def blocked_logprobs(
    hidden: Tensor, matrix: Matrix, asked: LogprobRequest
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, both (T,), differentiable in hidden states (T, D) and matrix."""
    with in_float32(asked.rounds):
        scores: tuple[Tensor, Tensor] = _BlockedLogprobs.apply(hidden, *matrix, asked)
    return scores


@torch.no_grad()
def blocked_scores(hidden: Tensor, matrix: Matrix, targets: Tensor, temperature: float) -> Tensor:
    """The log-probs (T,) of the targets, without gradients and without entropies."""
    weight, bias = matrix
    if rounding := cpu_matmul.rounds():
        hidden, weight, bias = operands(hidden, weight, bias)
    size = min(rows_of(len(weight)), len(hidden))
    kept, logprobs = hidden.new_empty(size, len(weight)), hidden.new_empty(len(hidden))
    with in_float32(rounding):
        for part in _blocks(len(hidden), size):
            logits = product(hidden[part], weight, bias, _place(kept, part, hidden))
            select(logits, targets[part], temperature, SoftmaxOutput(logprobs[part]))
    return logprobs


def product(rows: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor) -> Tensor:
    """Return rows @ weight.T + bias for rows (T, D) and weight (V, D), without gradients. If torch
    multiplies, the result is in `place` (T, V); oneDNN returns a new tensor."""
    if cpu_matmul.multiplies("forward", len(rows), weight):
        return cpu_matmul.multiply(rows, weight, bias)
    if bias is None:
        return torch.mm(rows, weight.t(), out=place)
    return torch.addmm(bias, rows, weight.t(), out=place)


def _multiply_back(block: Tensor, weight: Tensor, place: Tensor) -> None:
    if cpu_matmul.multiplies("backward", len(block), weight):
        place.copy_(cpu_matmul.multiply(block, weight.t()))
    else:
        torch.mm(block, weight, out=place)


def add_outer(total: Tensor, hidden: Tensor, block: Tensor) -> None:
    """Add the gradient of the head's matrix (V, D) to `total` in place. The gradient is block.T @
    hidden, for hidden states (T, D) and the gradient `block` (T, V) of their logits. Torch or
    oneDNN computes it."""
    if cpu_matmul.multiplies("weight", len(block), total):
        total += cpu_matmul.outer(block, hidden)
    else:
        total.addmm_(block.t(), hidden)


def rows_of(vocabulary: int) -> int:
    """The number of rows of a block, if a row has `vocabulary` logits."""
    return max(_MIN_ROWS, CACHED_ELEMENTS // vocabulary)


def _room(hidden: Tensor, weight: Tensor, asked: LogprobRequest) -> tuple[Tensor, int]:
    """Allocate the logits of all tokens if they are stored, otherwise of a block. Also returns the
    number of rows of a block."""
    tokens, vocabulary = len(hidden), len(weight)
    rows, most = rows_of(vocabulary), max(1, asked.chunk_elements // vocabulary)
    if tokens > most:
        rows = min(rows, most)
        return hidden.new_empty(rows, vocabulary), rows
    return hidden.new_empty(tokens, vocabulary), rows


def _blocks(tokens: int, rows: int) -> Iterator[slice]:
    for start in range(0, tokens, rows):
        yield slice(start, min(start + rows, tokens))


def _place(kept: Tensor, part: slice, hidden: Tensor) -> Tensor:
    """The rows of a block in `kept`: its own rows if all are stored, otherwise the first rows."""
    return kept[part] if len(kept) == len(hidden) else kept[: part.stop - part.start]
