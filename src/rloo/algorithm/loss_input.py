"""The inputs of the loss of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rloo.algorithm.ragged import Completions


class LossInputs(NamedTuple):
    """The inputs of a micro-batch's loss. `logprobs` and `entropy` (T,) have gradients.
    `advantages` are (N,) or (T,). `old` is `old_T` of `policy_loss`. `behavior` (T,) are the
    log-probs under the distribution that the tokens were sampled from. `weight_N` multiplies all
    terms of a completion (`Prompt.weight`). `kl`: see `trained_kl`."""

    logprobs: Tensor
    entropy: Tensor
    advantages: Tensor
    old: Tensor
    behavior: Tensor
    reference: Tensor | None
    truncated_N: Tensor
    weight_N: Tensor
    completions: Completions
    kl: Tensor | None = None
