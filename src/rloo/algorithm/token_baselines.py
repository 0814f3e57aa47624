"""The optimal token baseline: a baseline for each token, from the probabilities of its group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rloo.algorithm.baselines import group_min, group_sum
from rloo.algorithm.estimator_input import EstimatorInput, reads_score_norms
from rloo.algorithm.ragged import reward_to_go, sum_by


@reads_score_norms
def optimal_token(returns: EstimatorInput, leave1out: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Return the advantages (T,): the return of each token minus a mean of the returns of the other
    completions of its group at the same place,

        A_it = G_it - sum over j of W_jt G_jt / sum over j of W_jt,   W_jt = sum of w_js over s <= t

    over the completions j != i that have a token t. G is the reward minus the KL penalty of this
    token and later ones. w is `EstimatorInput.score_norm_T` plus `epsilon`, so that W is positive.
    This is the optimal token baseline (arXiv 2602.07078) without the completion itself, whose
    expected gradient is exact. If no other completion has a token t, the mean is over the others'
    last tokens.

    With `leave1out` False the sums include the completion itself, which is biased: this is the
    paper's form, as in verl's `optimal_token_baseline`. The baseline is 0 where no other completion
    has a token. Raises ValueError if `returns` has no score norms.
    """
    if returns.score_norm_T is None:
        raise ValueError(
            "the estimator optimal_token needs the squared score norm of each token "
            "(EstimatorInput.score_norm_T)"
        )
    sequence_T, size = returns.sequence_T, returns.num_completions
    group_T = returns.group_N[sequence_T]
    own_T = returns.reward_N[sequence_T] - returns.penalty_to_go_T
    # Relative to the group's lowest return: equal returns have advantages of exactly 0.
    above_T = own_T - group_min(own_T, group_T)[group_T]
    norm_T = returns.score_norm_T.clamp(min=0.0) + epsilon
    to_go_T = reward_to_go(norm_T, sequence_T, size)
    energy_T = sum_by(norm_T, sequence_T, size)[sequence_T] - to_go_T + norm_T
    place = _places(returns)
    here = _Means.over(above_T, energy_T, place.number_T)
    if not leave1out:
        return torch.where(here.number > 1, above_T - here.mean(), own_T)
    others = here.without(above_T, energy_T)
    last = place.last_N
    after = _Means.over(above_T[last], energy_T[last], returns.group_N)
    after_N = after.without(above_T[last], energy_T[last])
    baseline_T = torch.where(others.number > 0, others.mean(), after_N.mean()[sequence_T])
    return torch.where(after_N.number[sequence_T] > 0, above_T - baseline_T, 0.0)


class _Places(NamedTuple):
    """`number_T`: equal for tokens at the same place of completions of a group. `last_N`: the last
    token of each completion."""

    number_T: Tensor
    last_N: Tensor


def _places(returns: EstimatorInput) -> _Places:
    sequence_T, lengths_N = returns.sequence_T, returns.length_N.long()
    ends_N = lengths_N.cumsum(0)
    tokens_T = torch.arange(len(sequence_T), device=sequence_T.device)
    index_T = tokens_T - (ends_N - lengths_N)[sequence_T]
    key_T = returns.group_N[sequence_T] * len(sequence_T) + index_T
    return _Places(key_T.unique(return_inverse=True)[1], ends_N - 1)


class _Means(NamedTuple):
    """Sums that weighted means are made of, one entry for each value."""

    total: Tensor
    weight: Tensor
    number: Tensor

    @classmethod
    def over(cls, values: Tensor, weights: Tensor, group: Tensor) -> _Means:
        """The sums over each value's group."""
        parts = (weights * values, weights, torch.ones_like(values))
        return cls(*(group_sum(part, group)[group] for part in parts))

    def without(self, values: Tensor, weights: Tensor) -> _Means:
        """The sums over the other values of each value's group."""
        return _Means(self.total - weights * values, self.weight - weights, self.number - 1)

    def mean(self) -> Tensor:
        """The weighted means. Undefined where nothing is left."""
        return self.total / self.weight
