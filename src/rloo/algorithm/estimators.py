"""Advantage estimators: from rewards to advantages.

An estimator is a function of `EstimatorInput` that returns one advantage per completion, (N,), or
one per token, (T,). An estimator receives the completions of one group. An estimator with
`batch_scope` receives the completions of the whole rollout, even if the update splits the rollout
into micro-batches. The group estimators of this module receive several groups in one call, with the
same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloo.algorithm.baselines import Level, inverse_std, leave_one_out, subtract_baseline, whiten
from rloo.algorithm.estimator_input import EstimatorInput
from rloo.config.estimator_config import PAPER, EstimatorConfig

Estimator = Callable[..., Tensor]
E = TypeVar("E", bound=Callable[..., Any])


def batch_scope(function: E) -> E:
    """Mark an estimator that receives the whole rollout in one call, not one group."""
    function.scope = "batch"  # type: ignore[attr-defined]
    return function


def rloo(returns: EstimatorInput) -> Tensor:
    """Return the advantages (N,): each completion's return (reward minus KL penalty) minus the mean
    of the other returns of its group. This is the default estimator, REINFORCE Leave-One-Out
    (Ahmadian et al. 2024, arXiv 2402.14740, equations 5 to 9)."""
    return leave_one_out(returns.return_N, returns.group_N)


def grpo(returns: EstimatorInput, epsilon: float = 1e-4) -> Tensor:
    """Return the advantages (N,): each completion's return minus the mean of all returns of its
    group, divided by the standard deviation of these returns. This is GRPO (Shao et al. 2024, arXiv
    2402.03300, equation 3)."""
    above_N = subtract_baseline(returns.return_N, returns.group_N, mean_leave1out=False)
    return above_N * inverse_std(
        returns.return_N, returns.group_N, std_level="group", epsilon=epsilon
    )


@batch_scope
def reinforce_pp(returns: EstimatorInput, epsilon: float = 1e-8) -> Tensor:
    """Return the reward-to-go of each token, (T,), whitened to mean 0 and deviation 1 over all
    tokens of the rollout: REINFORCE++ without a baseline (Hu 2025, arXiv 2501.03262, as in
    verl)."""
    come_T = returns.per_token(returns.reward_N) - returns.penalty_to_go_T
    return whiten(come_T, epsilon=epsilon, epsilon_in_variance=True)


def composed(returns: EstimatorInput, form: EstimatorConfig = PAPER) -> Tensor:
    """Return the advantages with the baseline, standard deviation, clipping, normalisation and KL
    placement that `form` (options and `estimator_kwargs`) sets: (N,), or (T,) if the tokens of a
    completion have different advantages. With default options it equals `rloo`."""
    if form.mask_truncated_completions and not form.kl_of_truncated:
        free_T = returns.truncated_N[returns.sequence_T]
        returns = replace(returns, penalty_T=torch.where(free_T, 0.0, returns.penalty_T))
    to_go = form.kl_placement == "reward_to_go"
    paid_T = returns.penalty_to_go_T if to_go else returns.penalty_N[returns.sequence_T]
    values = _above_baseline(returns, paid_T, form)
    if form.advantage_clip_range is not None:
        values = values.clamp(*form.advantage_clip_range)
    if not form.kl_in_baseline:
        by_token = to_go or form.mean_over == "tokens"
        values = returns.per_token(values) - paid_T if by_token else values - returns.penalty_N
    if not form.normalize_advantages:
        return values
    return whiten(
        returns.per_token(values) if form.normalize_over == "tokens" else values,
        epsilon=form.advantage_epsilon,
        epsilon_in_variance=form.epsilon_in_variance,
    )


def _above_baseline(returns: EstimatorInput, paid_T: Tensor, form: EstimatorConfig) -> Tensor:
    """(return - baseline) / deviation, (N,) or (T,). `paid_T`: KL penalty in each token's
    return."""
    level: Level = "none" if form.mean_level == "running" else form.mean_level
    mean: dict[str, Any] = {"mean_level": level, "mean_leave1out": form.mean_leave1out}
    group_N, sequence_T = returns.group_N, returns.sequence_T
    if form.mean_over == "tokens":
        returns_T = returns.reward_N[sequence_T] - (paid_T if form.kl_in_baseline else 0.0)
        return subtract_baseline(returns_T, group_N[sequence_T], **mean)
    returns_N = returns.return_N if form.kl_in_baseline else returns.reward_N
    factor_N = inverse_std(
        returns_N,
        group_N,
        std_level=form.std_level,
        std_leave1out=form.std_leave1out,
        epsilon=form.advantage_epsilon,
        epsilon_in_variance=form.epsilon_in_variance,
    )
    result = subtract_baseline(returns_N, group_N, **mean) * factor_N
    if form.kl_placement == "reward_to_go" and form.kl_in_baseline:
        # The return of a token does not include the KL penalty of earlier tokens.
        paid_before_T = returns.penalty_N[sequence_T] - paid_T
        result = result[sequence_T] + paid_before_T * factor_N[sequence_T]
    return result
