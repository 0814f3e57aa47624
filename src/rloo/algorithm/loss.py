"""The mathematics of REINFORCE Leave-One-Out as pure functions on tensors.

Sequences are ragged and flat: per-token tensors have one entry for each completion token (`_T`),
per-completion tensors one for each completion (`_N`); `sequence_T` maps a token to its completion.
All functions keep the dtype of their inputs, float64 included.

    reward -> clip -> minus beta * KL -> minus the mean of the other rewards -> (scale) -> loss

The default is that of Ahmadian et al. 2024 (arXiv 2402.14740), equations 5 to 9: the whole
completion is one action, so log-probs are summed, and the KL penalty is part of the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

RatioLevel = Literal["sequence", "sequence_mean", "token"]
Aggregation = Literal["sequence", "sequence_token_mean", "token_mean", "constant"]
WeightMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

# exp(20) is 5e8, far outside every clipping range and well within float32. Without a bound a ratio
# could overflow to infinity, and infinity times an advantage of 0 is NaN.
MAX_LOG_RATIO = 20.0


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum `values` (T,) into `size` bins: bin `index[t]` receives `values[t]`."""
    return values.new_zeros(size).index_add(0, index, values)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with the log-ratio bounded by MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_T: Tensor, reference_T: Tensor, *, estimator: str = "k1", clip: float | None = None
) -> Tensor:
    """An estimate of KL(policy || reference) for each sampled token, in nats: (T,).

    With x = log policy - log reference, k1 is x, k2 is x^2 / 2 and k3 is exp(-x) - 1 + x (Schulman
    2020). All are differentiable; `clip` bounds them on both sides. Raises ValueError for an
    unknown name.
    """
    estimate = x = policy_T - reference_T
    if estimator == "k2":
        estimate = x**2 / 2
    elif estimator == "k3":
        # x is bounded in both terms: otherwise the linear one would pull away from the reference.
        x = x.clamp(min=-MAX_LOG_RATIO)
        # expm1 keeps the digits that exp(-x) - 1 loses for small x.
        estimate = torch.expm1(-x) + x
    elif estimator != "k1":
        raise ValueError(f"kl_estimator is {estimator!r}; it must be k1, k2 or k3")
    return estimate if clip is None else estimate.clamp(-clip, clip)


def reward_to_go(values_T: Tensor, sequence_T: Tensor, size: int) -> Tensor:
    """The sum of each token's value and the values of all later tokens of its completion: (T,).
    Completions lie one after another, with their tokens in order."""
    summed = values_T.double().cumsum(0)
    ends = sum_by(torch.ones_like(sequence_T), sequence_T, size).cumsum(0) - 1
    return (summed[ends][sequence_T] - summed + values_T).to(values_T.dtype)


class Completions(NamedTuple):
    """Which of the `size` completions of a micro-batch each token belongs to: (T,)."""

    sequence_T: Tensor
    size: int


def importance_weights(
    log_ratio_T: Tensor,
    completions: Completions,
    *,
    mode: WeightMode,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Weights (T,), detached, that correct for sampling from a distribution other than the policy.

    `log_ratio_T` is log policy, by the trainer before the rollout's first update, - log behavior.
    The weight is the ratio of each token, or of its whole completion (the product). Truncating
    bounds it by `upper` (Espeholt et al. 2018); masking drops what is above it or below `lower`
    (IcePop; token_mask is AReaL's decoupled objective, arXiv 2505.24298, equation 5).
    """
    log_ratio = log_ratio_T.detach()
    if mode.startswith("sequence"):
        log_ratio = sum_by(log_ratio, *completions)[completions.sequence_T]
    ratio = ratio_of(log_ratio)
    if mode.endswith("truncate"):
        return ratio.clamp(max=upper)
    inside = (ratio <= upper) & (ratio >= (0.0 if lower is None else lower))
    return torch.where(inside, ratio, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """The form of the clipped surrogate: what has a ratio, where the ratio is clipped, how terms
    are summed. Options of the same names, `epsilon_low` being `epsilon`, say it."""

    ratio_level: RatioLevel = "sequence"
    aggregation: Aggregation = "sequence"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None


PAPER = PolicyLossConfig()


class PolicyLoss(NamedTuple):
    """`loss` is a scalar. The masks of clipped ratios are (N,) or (T,), by the ratio's level."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def loss_denominator(
    aggregation: Aggregation, *, num_sequences: int, num_tokens: int, constant: float | None
) -> float:
    """The divisor of the summed loss of one optimizer step, over all ranks and micro-batches: the
    number of completions that count; with token_mean that of their tokens; with constant that of
    completions times `constant` (Dr. GRPO). Raises ValueError if that is None."""
    if aggregation == "token_mean":
        return float(max(num_tokens, 1))
    if aggregation == "constant":
        if constant is None:
            raise ValueError("loss_aggregation is constant; it needs a number (loss_constant)")
        return max(num_sequences, 1) * constant
    return float(max(num_sequences, 1))


def policy_loss(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages: Tensor,
    completions: Completions,
    form: PolicyLossConfig = PAPER,
    weights_T: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate, to be minimised, as a sum over this micro-batch.

    `advantages` are (N,), or (T,) with level "token". `old_T` are the trainer's log-probs before
    the first update on these completions (with one update `logprobs_T.detach()`: the ratio is 1 and
    the gradient that of REINFORCE). Ratio of level "sequence": product over the completion (TRL,
    the paper), one term; "sequence_mean": their geometric mean, as the ratio of each of its tokens
    (GSPO, arXiv 2507.18071); "token": each token its own (AReaL, ms-swift, verl). While the policy
    is "old", all three have one gradient. `delta` bounds the ratio where the advantage is negative
    (dual clip, arXiv 1912.09729). `weights_T` multiply the tokens' terms; those of a whole
    completion are equal for all of its tokens. Terms are then summed by `aggregate`.
    """
    sequence_T, size = completions
    level, aggregation = form.ratio_level, form.aggregation
    log_ratio = logprobs_T - old_T.detach()
    if level != "token":
        log_ratio = sum_by(log_ratio, sequence_T, size)
        if level == "sequence_mean":
            log_ratio = log_ratio / _lengths(sequence_T, size)
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1.0 - form.epsilon_low, 1.0 + form.epsilon_high)
    bounded = ratio if form.delta is None else ratio.clamp(max=form.delta)
    terms = -torch.minimum(bounded * advantages, clipped * advantages)
    if level != "sequence":
        terms_T = terms if level == "token" else terms[sequence_T]
        weighted = terms_T if weights_T is None else terms_T * weights_T
        loss = aggregate(weighted, completions, aggregation)
    else:
        if weights_T is not None:
            terms = terms * sum_by(weights_T, sequence_T, size) / _lengths(sequence_T, size)
        if aggregation == "sequence_token_mean":
            terms = terms / _lengths(sequence_T, size)
        loss = terms.sum()
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - form.epsilon_low) & (advantages < 0)
        clipped_high = (ratio > 1.0 + form.epsilon_high) & (advantages > 0)
    return PolicyLoss(loss, clipped_low, clipped_high)


def aggregate(values_T: Tensor, completions: Completions, aggregation: Aggregation) -> Tensor:
    """The sum over tokens, with each completion divided by its length for "sequence_token_mean"
    (AReaL's printed formula): a scalar, to be divided by `loss_denominator`."""
    if aggregation == "sequence_token_mean":
        return (sum_by(values_T, *completions) / _lengths(*completions)).sum()
    return values_T.sum()


def _lengths(sequence_T: Tensor, size: int) -> Tensor:
    return sum_by(torch.ones_like(sequence_T), sequence_T, size).clamp(min=1)
