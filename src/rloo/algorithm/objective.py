"""The mathematics of REINFORCE Leave-One-Out as pure functions on tensors.

Sequences are ragged and flat: per-token tensors (`_T`) have one entry for each completion token,
per-completion tensors (`_N`) one for each completion; `sequence_T` maps a token to its completion
and `group_N` a completion to its group. A missing reward is NaN. All functions keep the dtype of
their inputs, float64 included.

    reward -> clip -> minus beta * KL -> minus the mean of the other rewards -> (scale) -> loss

The default is that of Ahmadian et al. 2024 (arXiv 2402.14740), equations 5 to 9: the whole
completion is one action, so log-probs are summed, and the KL penalty is part of the reward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Level = Literal["none", "group", "batch"]
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
    x = policy_T - reference_T
    if estimator == "k1":
        estimate = x
    elif estimator == "k2":
        estimate = x**2 / 2
    elif estimator == "k3":
        # x is bounded in both terms: otherwise the linear one would pull away from the reference.
        x = x.clamp(min=-MAX_LOG_RATIO)
        # expm1 keeps the digits that exp(-x) - 1 loses for small x.
        estimate = torch.expm1(-x) + x
    else:
        raise ValueError(f"kl_estimator is {estimator!r}; it must be k1, k2 or k3")
    return estimate if clip is None else estimate.clamp(-clip, clip)


def return_to_go(values_T: Tensor, sequence_T: Tensor, size: int) -> Tensor:
    """The sum of each token's value and the values of all later tokens of its completion: (T,).

    Completions lie one after another, with their tokens in order.
    """
    summed = values_T.double().cumsum(0)
    ends = sum_by(torch.ones_like(sequence_T), sequence_T, size).cumsum(0) - 1
    return (summed[ends][sequence_T] - summed + values_T).to(values_T.dtype)


def centred(
    values: Tensor, group: Tensor, *, mean_level: Level = "group", mean_leave1out: bool = True
) -> Tensor:
    """Values minus their baseline, with the shape (E,) of `values`. The baseline is the mean over
    the group or over all elements, without the element itself if `mean_leave1out`.

    The default is leave-one-out, `r_i - mean of the other r_j of the group`, which equals
    `K / (K - 1) * (r_i - group mean)`. A missing value (NaN) is left out of its siblings' baseline.
    Missing values and those without siblings get exactly 0, as do all members of a group with equal
    values (sums are relative to the group's minimum). A mean that includes the element itself is
    biased. Elements are completions, or tokens (AReaL's documented `adv_norm`, which leaves out one
    token).
    """
    if mean_level == "none":
        return torch.where(values.isnan(), 0.0, values)
    index = group if mean_level == "group" else torch.zeros_like(group)
    return _centre(values, index, leave_one_out=mean_leave1out)


def scale(
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    std_level: Level,
    std_leave1out: bool = False,
    epsilon: float = 1e-4,
    epsilon_in_variance: bool = False,
) -> Tensor:
    """The factor of the advantages: 1 / (standard deviation + epsilon), (N,).

    The deviation is that of the group or of the batch, with Bessel's correction, and without the
    element itself if `std_leave1out` (NeMo-RL). The factor is 1 where the deviation is 0. With
    `epsilon_in_variance` it is 1 / sqrt(variance + epsilon) (verl).
    """
    if std_level == "none":
        return torch.ones_like(rewards_N)
    index = group_N if std_level == "group" else torch.zeros_like(group_N)
    if std_leave1out:
        variance = _variance_of_others(rewards_N, index)
    else:
        variance = _variance(rewards_N, index)[index]
    return _inverse_deviation(variance, epsilon, epsilon_in_variance)


def standardise(
    values: Tensor, *, epsilon: float = 1e-4, epsilon_in_variance: bool = False
) -> Tensor:
    """Scale all values to mean 0 and deviation 1 (TRL's `normalize_advantages`; over tokens,
    AReaL's `adv_norm` and verl's `masked_whiten`). NaN is left out and becomes 0."""
    whole = torch.zeros(values.shape, dtype=torch.long, device=values.device)
    factor = _inverse_deviation(_variance(values, whole), epsilon, epsilon_in_variance)
    return _centre(values, whole, leave_one_out=False) * (factor[0] if len(factor) else 1.0)


def importance_weights(
    trainer_T: Tensor,
    sampler_T: Tensor,
    sequence_T: Tensor,
    size: int,
    *,
    mode: WeightMode,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Weights (T,), detached, that correct for sampling from a distribution other than the policy.

    A weight is the probability ratio policy / behavior of a token, or of its whole completion (the
    product). Truncating bounds it by `upper` (Espeholt et al. 2018); masking drops ratios above
    `upper` or below `lower` (IcePop). The policy is that before the rollout's first update: with
    token_mask this is AReaL's decoupled objective (arXiv 2505.24298, equation 5).
    """
    log_ratio = (trainer_T - sampler_T).detach()
    if mode.startswith("sequence"):
        log_ratio = sum_by(log_ratio, sequence_T, size)[sequence_T]
    ratio = ratio_of(log_ratio)
    if mode.endswith("truncate"):
        return ratio.clamp(max=upper)
    inside = (ratio <= upper) & (ratio >= (0.0 if lower is None else lower))
    return torch.where(inside, ratio, 0.0)


class PolicyLoss(NamedTuple):
    """`loss` is a scalar. The masks of clipped ratios are (N,) or (T,), by the ratio's level."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def loss_denominator(
    aggregation: Aggregation, *, num_sequences: int, num_tokens: int, constant: float | None
) -> float:
    """The divisor of the summed loss of one optimizer step, over all ranks and micro-batches.

    sequence and sequence_token_mean: the number of completions that count; token_mean: the number
    of their tokens; constant: completions times `constant` (Dr. GRPO).
    """
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
    sequence_T: Tensor,
    *,
    size: int,
    denominator: float,
    ratio_level: RatioLevel = "sequence",
    aggregation: Aggregation = "sequence",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    weights_T: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate loss, to be minimised: the sum over this micro-batch / `denominator`.

    `advantages` are (N,), or (T,) with level "token"; N is `size`. `old_T` are the policy log-probs
    before the first update on these completions. If there is only one update, pass
    `logprobs_T.detach()`: the ratio is then 1 and the gradient that of REINFORCE.

    Levels of the ratio: "sequence" is the product over the completion, one term (TRL, the paper);
    "sequence_mean" is the geometric mean over the completion, used for each of its tokens (GSPO,
    arXiv 2507.18071); "token" is each token's own ratio (AReaL, ms-swift, verl). At a ratio of 1
    all three have the same gradient. `delta` bounds the ratio where the advantage is negative (dual
    clip, arXiv 1912.09729). `weights_T` multiply the tokens' terms and must be constant over a
    completion if it has one term. `aggregate` sums the terms.
    """
    log_ratio = logprobs_T - old_T.detach()
    if ratio_level != "token":
        log_ratio = sum_by(log_ratio, sequence_T, size)
        if ratio_level == "sequence_mean":
            log_ratio = log_ratio / _lengths(sequence_T, size)
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    terms = -torch.minimum(bounded * advantages, clipped * advantages)
    if ratio_level != "sequence":
        terms_T = terms if ratio_level == "token" else terms[sequence_T]
        weighted = terms_T if weights_T is None else terms_T * weights_T
        loss = aggregate(weighted, sequence_T, size, aggregation=aggregation)
    else:
        if weights_T is not None:
            terms = terms * sum_by(weights_T, sequence_T, size) / _lengths(sequence_T, size)
        if aggregation == "sequence_token_mean":
            terms = terms / _lengths(sequence_T, size)
        loss = terms.sum()
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - epsilon_low) & (advantages < 0)
        clipped_high = (ratio > 1.0 + epsilon_high) & (advantages > 0)
    return PolicyLoss(loss / denominator, clipped_low, clipped_high)


def aggregate(
    values_T: Tensor, sequence_T: Tensor, size: int, *, aggregation: Aggregation
) -> Tensor:
    """The sum over tokens, with each completion divided by its length for "sequence_token_mean"
    (AReaL's printed formula): a scalar, to be divided by `loss_denominator`."""
    if aggregation == "sequence_token_mean":
        return (sum_by(values_T, sequence_T, size) / _lengths(sequence_T, size)).sum()
    return values_T.sum()


def _lengths(sequence_T: Tensor, size: int) -> Tensor:
    return sum_by(torch.ones_like(sequence_T), sequence_T, size).clamp(min=1)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    size = int(index.max()) + 1 if index.numel() else 0
    return sum_by(values, index, size)


def _centre(values: Tensor, index: Tensor, *, leave_one_out: bool) -> Tensor:
    """Values minus the mean over their bin, without themselves if `leave_one_out`. NaN is left out
    and becomes 0, as does a value alone in its bin."""
    valid = ~values.isnan()
    counts = _group_sum(valid.to(values.dtype), index)
    floor = torch.full_like(counts, torch.inf).scatter_reduce(
        0, index, torch.where(valid, values, torch.inf), "amin"
    )
    relative = torch.where(valid, values - floor[index], 0.0)
    totals = _group_sum(relative, index)[index]
    counts = counts[index]
    if leave_one_out:
        centred = relative - (totals - relative) / (counts - 1).clamp(min=1)
    else:
        centred = relative - totals / counts.clamp(min=1)
    return torch.where(valid & (counts >= 2), centred, 0.0)


def _variance(values: Tensor, index: Tensor) -> Tensor:
    """Variance over each bin with Bessel's correction, ignoring NaN; 0 for fewer than two
    values."""
    deviations = _centre(values, index, leave_one_out=False)
    counts = _group_sum((~values.isnan()).to(values.dtype), index)
    return _group_sum(deviations**2, index) / (counts - 1).clamp(min=1)


def _variance_of_others(values: Tensor, index: Tensor) -> Tensor:
    """For each value, the variance of the others in its bin with Bessel's correction; 0 for fewer
    than two others. If S is the sum of squares about the bin's mean m, that of the others about
    their own mean is S - n / (n - 1) * (x - m)^2."""
    counts = _group_sum((~values.isnan()).to(values.dtype), index)[index]
    deviations = _centre(values, index, leave_one_out=False)
    squares = _group_sum(deviations**2, index)[index]
    others = squares - counts / (counts - 1).clamp(min=1) * deviations**2
    # A remainder from rounding equal values does not count as variance.
    rounding = 16 * torch.finfo(values.dtype).eps
    others = torch.where(others <= rounding * squares, 0.0, others)
    return others / (counts - 2).clamp(min=1)


def _inverse_deviation(variance: Tensor, epsilon: float, in_variance: bool) -> Tensor:
    divisor = (variance + epsilon).sqrt() if in_variance else variance.sqrt() + epsilon
    return torch.where(variance > 0, 1.0 / divisor, 1.0)
