"""The leave-one-out baseline, and other means and standard deviations that estimators use.

Inputs have E values, (E,): one per completion, or one per token. `group` is the group number of
each value; on a GPU, group numbers must be below E. Results have the dtype of the inputs, float64
included. NaN is a missing value. Only `leave_one_out` does not accept NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rloo.algorithm.ragged import sum_by

Level = Literal["none", "group", "batch"]


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """The advantage of each completion: its reward minus the mean of the K - 1 other rewards of its
    group,

        A_i = r_i - 1 / (K - 1) * sum of r_j over j != i

    (Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
    arXiv 2402.14740, section 3). The advantage is exactly 0 in a group of equal rewards, and in a
    group of one."""
    lowest = group_min(rewards, group)[group]
    above = rewards - lowest
    total = group_sum(above, group)[group]
    others = group_sum(torch.ones_like(rewards), group)[group] - 1
    advantages = above - (total - above) / others.clamp(min=1)
    return torch.where(others > 0, advantages, 0.0)


def subtract_baseline(
    values: Tensor, group: Tensor, *, mean_level: Level = "group", mean_leave1out: bool = True
) -> Tensor:
    """Return each value minus its baseline, (E,). The baseline is the mean over the group or over
    all values. With `mean_leave1out` the mean leaves out the value itself.

    The default is leave-one-out, `r_i - mean of the other r_j of the group`. It equals
    `K / (K - 1) * (r_i - group mean)`. Baselines ignore missing values (NaN). The result is exactly
    0 for a missing value, for the only value of a group, and for all values of a group with equal
    values (sums are relative to the group's minimum). A mean that includes the value itself is a
    biased baseline.
    """
    if mean_level == "none":
        return torch.where(values.isnan(), 0.0, values)
    index = group if mean_level == "group" else torch.zeros_like(group)
    return _subtract_mean(values, index, leave_one_out=mean_leave1out)


def inverse_std(
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    std_level: Level,
    std_leave1out: bool = False,
    epsilon: float = 1e-4,
    epsilon_in_variance: bool = False,
) -> Tensor:
    """Return the factors that scale advantages, (N,): 1 / (standard deviation + epsilon), or with
    `epsilon_in_variance` (verl) 1 / sqrt(variance + epsilon). A factor is 1 if the deviation is 0.
    The deviation is over the group or batch, with Bessel's correction. With `std_leave1out`
    (NeMo-RL) the deviation leaves out the completion itself."""
    if std_level == "none":
        return torch.ones_like(rewards_N)
    index = group_N if std_level == "group" else torch.zeros_like(group_N)
    variance = (_variance_of_others if std_leave1out else _variance)(rewards_N, index)
    return _inverse_deviation(variance, epsilon, epsilon_in_variance)


def whiten(values: Tensor, *, epsilon: float = 1e-4, epsilon_in_variance: bool = False) -> Tensor:
    """Shift and scale all values to mean 0 and standard deviation 1 (TRL's `normalize_advantages`;
    over tokens, AReaL's `adv_norm` and verl's `masked_whiten`). NaN is ignored and becomes 0."""
    whole = torch.zeros(values.shape, dtype=torch.long, device=values.device)
    factor = _inverse_deviation(_variance(values, whole), epsilon, epsilon_in_variance)
    return _subtract_mean(values, whole, leave_one_out=False) * factor


def _num_groups(index: Tensor) -> int:
    """Return an upper bound of the number of groups. On a GPU: len(index), without a sync."""
    size = index.numel()
    return int(index.max()) + 1 if size and index.device.type == "cpu" else size


def group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Return the sum of each group's values."""
    return sum_by(values, index, _num_groups(index))


def group_min(values: Tensor, index: Tensor) -> Tensor:
    """Return the smallest value of each group, infinity for a group without values."""
    lowest = values.new_full((_num_groups(index),), torch.inf)
    return lowest.scatter_reduce(0, index, values, "amin")


def _subtract_mean(values: Tensor, index: Tensor, *, leave_one_out: bool) -> Tensor:
    """Return values minus their bin's mean. NaN is ignored. NaN and a bin's only value become 0."""
    valid = ~values.isnan()
    counts = group_sum(valid.to(values.dtype), index)
    floor = group_min(torch.where(valid, values, torch.inf), index)
    relative = torch.where(valid, values - floor[index], 0.0)
    totals = group_sum(relative, index)[index]
    counts = counts[index]
    if leave_one_out:
        centred = relative - (totals - relative) / (counts - 1).clamp(min=1)
    else:
        centred = relative - totals / counts.clamp(min=1)
    return torch.where(valid & (counts >= 2), centred, 0.0)


def _variance(values: Tensor, index: Tensor) -> Tensor:
    """Variance of each value's bin, with Bessel's correction, ignoring NaN; 0 for one value."""
    deviations = _subtract_mean(values, index, leave_one_out=False)
    counts = group_sum((~values.isnan()).to(values.dtype), index)
    return (group_sum(deviations**2, index) / (counts - 1).clamp(min=1))[index]


def _variance_of_others(values: Tensor, index: Tensor) -> Tensor:
    """For each value x, the variance of the other values of its bin with Bessel's correction; 0 for
    fewer than two other values. If the bin has n values with mean m and sum of squares S about m,
    the sum of squares of the other values about their mean is S - n / (n - 1) * (x - m)^2."""
    counts = group_sum((~values.isnan()).to(values.dtype), index)[index]
    deviations = _subtract_mean(values, index, leave_one_out=False)
    squares = group_sum(deviations**2, index)[index]
    others = squares - counts / (counts - 1).clamp(min=1) * deviations**2
    # The rounding error of equal values does not count as variance.
    rounding = 16 * torch.finfo(values.dtype).eps
    others = torch.where(others <= rounding * squares, 0.0, others)
    return others / (counts - 2).clamp(min=1)


def _inverse_deviation(variance: Tensor, epsilon: float, in_variance: bool) -> Tensor:
    divisor = (variance + epsilon).sqrt() if in_variance else variance.sqrt() + epsilon
    return torch.where(variance > 0, 1.0 / divisor, 1.0)
