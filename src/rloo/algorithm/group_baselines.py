"""Baselines that weight the rewards of a group, or mix them with those of other groups."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.algorithm.baselines import group_min, group_sum, leave_one_out
from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimators import batch_scope


def length_weighted(returns: EstimatorInput, leave1out: bool = True) -> Tensor:
    """Return the advantages (N,): each completion's return minus the mean of the other returns of
    its group, weighted by the lengths of their completions.

    If the squared norm of a completion's gradient is proportional to its length, the weighted mean
    of all returns of the group is the baseline of minimum variance (OPO, Hao et al. 2025, arXiv
    2505.23585). That mean includes the completion itself (`leave1out` False), which is biased. The
    advantage is exactly 0 in a group of equal returns, and in a group of one."""
    group_N, weight_N = returns.group_N, returns.length_N
    above_N = returns.return_N - group_min(returns.return_N, group_N)[group_N]
    total_N = group_sum(weight_N * above_N, group_N)[group_N]
    mass_N = group_sum(weight_N, group_N)[group_N]
    if leave1out:
        total_N, mass_N = total_N - weight_N * above_N, mass_N - weight_N
    return torch.where(mass_N > 0, above_N - total_N / mass_N.clamp(min=1), 0.0)


@batch_scope
def shrinkage(returns: EstimatorInput) -> Tensor:
    """Return the advantages (N,): each completion's return R_i minus its baseline, a mixture of the
    mean m_i of the n - 1 other returns of its group and the mean o of the other prompts' means:

        A_i = R_i - (1 - l_i) m_i - l_i o,   l_i = a_i / (a_i + c_i)

    a_i and c_i estimate the mean squared errors of m_i and o as estimates of the prompt's expected
    return (James and Stein 1961; as a baseline in arXiv 2511.03710). They are computed from the
    rollout without completion i, so the expected gradient is exact. l_i is 0 if the rollout has one
    prompt, and 1 if the prompt has one completion."""
    own_N = returns.return_N - returns.return_N.min()
    group_N = returns.group_N.unique(return_inverse=True)[1]
    above_N, size_G = leave_one_out(own_N, group_N), group_sum(torch.ones_like(own_N), group_N)
    if len(size_G) == 1:
        return above_N
    mean_G = group_sum(own_N, group_N) / size_G
    weight_N = _mixing_weight(own_N, group_N, size_G, mean_G)
    others_N = (mean_G.sum() - mean_G)[group_N] / (len(size_G) - 1)
    return (1 - weight_N) * above_N + weight_N * (own_N - others_N)


def _mixing_weight(own_N: Tensor, group_N: Tensor, size_G: Tensor, mean_G: Tensor) -> Tensor:
    """The weight l_i of `shrinkage`, (N,)."""
    num_groups, size_N, mean_N = len(size_G), size_G[group_N], mean_G[group_N]
    left_N = (size_N - 1).clamp(min=1)
    others_N = own_N - leave_one_out(own_N, group_N)  # the mean of the others of the group
    # Variance within prompts, pooled: the sum of squares and the degrees of freedom, without i.
    # The deviations of equal returns are exactly 0.
    deviation_N = (own_N - others_N) * left_N / size_N
    squares = (deviation_N**2).sum()
    within_N = squares - size_N / left_N * deviation_N**2
    within_N = torch.where(within_N <= 1e-14 * squares, 0.0, within_N)
    freedom = (size_G - 1).sum() - 1
    within_N = within_N / freedom.clamp(min=1)
    # Variance of the prompts' expected returns: the variance of their means less its noise.
    shift_N = others_N - mean_N
    sum_N = mean_G.sum() + shift_N
    squares_N = (mean_G**2).sum() + others_N**2 - mean_N**2
    inverse_N = (1 / size_G).sum() - 1 / size_N + 1 / left_N
    spread_N = (squares_N - sum_N**2 / num_groups) / (num_groups - 1)
    between_N = (spread_N - within_N * inverse_N / num_groups).clamp(min=0)
    noise_N = within_N * (inverse_N - 1 / left_N) / (num_groups - 1)
    error_N = between_N + (between_N + noise_N) / (num_groups - 1)  # of the other prompts' mean
    ours_N = within_N / left_N
    weight_N = torch.where(ours_N > 0, ours_N / (ours_N + error_N), 0.0)
    return torch.where(size_N > 1, weight_N, 1.0)
