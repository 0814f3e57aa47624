"""The mathematics of REINFORCE Leave-One-Out as pure functions on tensors.

It knows nothing of models, devices, options or logging. Sequences are ragged and flat: per-token
tensors have one entry for each completion token (`_T`), per-completion tensors one for each
completion (`_N`); `sequence_T` maps a token to its completion and `group_N` a completion to its
group. A missing reward is NaN. All functions keep the dtype of their inputs, float64 included.

    reward -> clip -> minus beta * KL -> minus the mean of the other rewards -> (normalise) -> loss

Source of the default: Ahmadian et al. 2024 (arXiv 2402.14740), equations 5 to 9: the whole
completion is one action, so log-probs are summed, and the KL penalty is part of the reward.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Level = Literal["none", "group", "batch"]
RatioLevel = Literal["sequence", "token"]
Aggregation = Literal["sequence", "sequence_token_mean", "token_mean", "constant"]

# exp(20) is 5e8: far outside every clipping range, far inside float32. Without a bound a ratio
# overflows to infinity, and infinity times an advantage of 0 is NaN.
MAX_LOG_RATIO = 20.0


def sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum `values` (T,) into `size` bins: bin `index[t]` receives `values[t]`."""
    return values.new_zeros(size).index_add(0, index, values)


def clip_rewards(rewards_N: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Clamp rewards to (low, high), before the KL penalty and before the baseline (TRL's place)."""
    return rewards_N if bounds is None else rewards_N.clamp(*bounds)


def sequence_kl(policy_T: Tensor, reference_T: Tensor, sequence_T: Tensor, size: int) -> Tensor:
    """The k1 estimate of KL(policy || reference) for each completion, in nats: (N,), detached.

    The log-ratio summed over the completion's tokens; its mean over samples of the policy is the
    divergence of whole completions. It can be negative for a single completion.
    """
    return sum_by((policy_T - reference_T).detach(), sequence_T, size)


def countable(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """bool (N,): scored completions whose group has at least two scores.

    Only these have a leave-one-out baseline; the others carry no gradient and no weight.
    """
    scored = ~rewards_N.isnan()
    return scored & (_group_sum(scored.to(rewards_N.dtype), group_N)[group_N] >= 2)


def leave_one_out(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """`reward - mean of the other scored rewards of its group`: (N,).

    Equals `K / (K - 1) * (reward - group mean)` over the K scored ones. A missing reward (NaN)
    leaves the baseline of its siblings too; missing ones and singletons get exactly 0, as do all
    members of a group with equal rewards (sums are taken relative to the group's minimum).
    """
    return _centre(rewards_N, group_N, leave_one_out=True)


def advantages(
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    mean_level: Level = "group",
    mean_leave1out: bool = True,
    std_level: Level = "none",
    normalize: bool = False,
    epsilon: float = 1e-4,
) -> Tensor:
    """Advantages of completions: (N,); 0 where `countable` is False.

    `mean_level` is where the baseline's mean is taken (over a group, over the batch, or 0), without
    the completion itself if `mean_leave1out`. `std_level` divides by (standard deviation of the
    rewards at that level + epsilon), with Bessel's correction. `normalize` then makes the batch's
    advantages mean 0 and deviation 1 (TRL's `normalize_advantages`). One completion is one element
    at every level: AReaL's documented `adv_norm` counts tokens instead. A mean that holds the
    completion itself, and any division by a deviation, is biased.
    """
    valid = countable(rewards_N, group_N)
    kept = torch.where(valid, rewards_N, torch.nan)
    whole = torch.zeros_like(group_N)
    if mean_level == "none":
        result = torch.where(valid, kept, 0.0)
    else:
        index = group_N if mean_level == "group" else whole
        result = _centre(kept, index, leave_one_out=mean_leave1out)
    if std_level != "none":
        index = group_N if std_level == "group" else whole
        result = result / (_deviation(kept, index)[index] + epsilon)
    if normalize:
        centred = _centre(torch.where(valid, result, torch.nan), whole, leave_one_out=False)
        result = centred / (_deviation(torch.where(valid, result, torch.nan), whole)[0] + epsilon)
    return torch.where(valid, result, 0.0)


class PolicyLoss(NamedTuple):
    """`loss` is a scalar; the two masks are (N,) or (T,) by the ratio's level, detached."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def loss_denominator(
    aggregation: Aggregation, *, num_sequences: int, num_tokens: int, constant: float | None
) -> float:
    """What the summed loss of one optimizer step is divided by, over all ranks and micro-batches.

    sequence, sequence_token_mean: the number of countable completions; token_mean: of their
    tokens; constant: completions times `constant` (Dr. GRPO's form).
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
    advantages_N: Tensor,
    sequence_T: Tensor,
    *,
    denominator: float,
    ratio_level: RatioLevel = "sequence",
    aggregation: Aggregation = "sequence",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> PolicyLoss:
    """The clipped surrogate, to be minimised, as a sum over this micro-batch / `denominator`.

    `old_T` are the trainer's own log-probs before the first update on these completions (pass
    `logprobs_T.detach()` when there is one update: the ratio is then 1 and the gradient that of
    REINFORCE). Ratio of level "sequence": product over the completion (TRL, the paper); "token":
    one ratio a token (AReaL, ms-swift, verl). A completion's terms are multiplied by 1, except for
    aggregation "sequence_token_mean", which divides them by its length (AReaL's printed formula
    with level "token").
    """
    size = advantages_N.shape[0]
    log_ratio = logprobs_T - old_T.detach()
    if ratio_level == "sequence":
        log_ratio = sum_by(log_ratio, sequence_T, size)
        advantage = advantages_N
    else:
        advantage = advantages_N[sequence_T]
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    terms = -torch.minimum(ratio * advantage, clipped * advantage)
    if ratio_level == "token":
        terms = sum_by(terms, sequence_T, size)
    if aggregation == "sequence_token_mean":
        lengths = sum_by(torch.ones_like(logprobs_T), sequence_T, size).clamp(min=1)
        terms = terms / lengths
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - epsilon_low) & (advantage < 0)
        clipped_high = (ratio > 1.0 + epsilon_high) & (advantage > 0)
    return PolicyLoss(terms.sum() / denominator, clipped_low, clipped_high)


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    size = int(index.max()) + 1 if index.numel() else 0
    return sum_by(values, index, size)


def _centre(values: Tensor, index: Tensor, *, leave_one_out: bool) -> Tensor:
    """Values minus the mean over their bin, without themselves if `leave_one_out`; NaN is left
    out, and is 0 in the result, as is everything in a bin of one."""
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


def _deviation(values: Tensor, index: Tensor) -> Tensor:
    """Standard deviation over each bin with Bessel's correction, NaN left out; 0 below two."""
    centred = _centre(values, index, leave_one_out=False)
    counts = _group_sum((~values.isnan()).to(values.dtype), index)
    return (_group_sum(centred**2, index) / (counts - 1).clamp(min=1)).sqrt()
