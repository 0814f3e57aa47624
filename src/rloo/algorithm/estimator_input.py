"""The input of an estimator: scored completions as flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloo.algorithm.ragged import reward_to_go, sum_by

E = TypeVar("E", bound=Callable[..., Any])


def reads_score_norms(function: E) -> E:
    """Mark an estimator that reads `EstimatorInput.score_norm_T`, which the first forward pass on a
    rollout computes on request."""
    function.reads_score_norms = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """The scored completions of one group, or of a whole rollout: N completions with T tokens in
    all.

    Completions are concatenated, group by group. Rewards and penalties are float64, without
    gradients. `reward_N` are the rewards after clipping and scaling, without KL penalty; no reward
    is missing. `penalty_T` is the KL penalty of each token, beta times its KL in nats (see
    `token_kl.token_penalty`): 0 if the KL is not in the reward. `sequence_T` is the index of each
    token's completion. `group_N` is the number of each completion's group (on a GPU, groups are
    numbered from 0). `truncated_N` is true for completions that reached the length limit.
    `score_norm_T` is None, unless the estimator is marked by `reads_score_norms`: the squared norm
    of the gradient of each token's log-prob by the logits over the temperature, 1 - 2 p(token) +
    sum of p(v)^2 over the vocabulary. `pilot_N` is true for completions that were sampled before
    the number of the others of their group was chosen; None if there are none. Estimators do not
    read it: see `LoadedEstimator.advantages`. `coefficient_N2` has a and d of each completion's
    baseline (`Sample.coefficients`), if the estimator is `regression`; None if all are 0.
    """

    reward_N: Tensor
    penalty_T: Tensor
    sequence_T: Tensor
    group_N: Tensor
    truncated_N: Tensor
    score_norm_T: Tensor | None = None
    pilot_N: Tensor | None = None
    coefficient_N2: Tensor | None = None

    @property
    def num_completions(self) -> int:
        """N."""
        return len(self.reward_N)

    @property
    def length_N(self) -> Tensor:
        """The number of tokens of each completion."""
        return sum_by(torch.ones_like(self.penalty_T), self.sequence_T, self.num_completions)

    @property
    def penalty_N(self) -> Tensor:
        """The KL penalty of each completion, summed over its tokens."""
        return sum_by(self.penalty_T, self.sequence_T, self.num_completions)

    @property
    def return_N(self) -> Tensor:
        """Reward minus KL penalty, the paper's R."""
        return self.reward_N - self.penalty_N

    @property
    def penalty_to_go_T(self) -> Tensor:
        """The KL penalty of each token and all later tokens of its completion."""
        return reward_to_go(self.penalty_T, self.sequence_T, self.num_completions)

    def per_token(self, values: Tensor) -> Tensor:
        """Return one value per token. If `values` has one value per completion, each token gets the
        value of its completion."""
        # If the sizes are equal, every completion is a single token.
        return values if len(values) == len(self.sequence_T) else values[self.sequence_T]

    def select(self, kept_N: Tensor) -> EstimatorInput:
        """Return only the completions for which `kept_N`, bool (N,), is true."""
        kept_T = kept_N[self.sequence_T]
        return EstimatorInput(
            self.reward_N[kept_N],
            self.penalty_T[kept_T],
            (kept_N.cumsum(0) - 1)[self.sequence_T[kept_T]],
            self.group_N[kept_N].unique_consecutive(return_inverse=True)[1],
            self.truncated_N[kept_N],
            None if self.score_norm_T is None else self.score_norm_T[kept_T],
            None if self.pilot_N is None else self.pilot_N[kept_N],
            None if self.coefficient_N2 is None else self.coefficient_N2[kept_N],
        )

    def compute(self, function: Callable[[EstimatorInput], Tensor]) -> Tensor:
        """Return the values of `function`, (N,) or (T,). Those of a pilot are computed among the
        pilot."""
        values = function(self)
        if self.pilot_N is None:
            return values
        part, place = self.select(self.pilot_N), self.pilot_N
        found = function(part)
        if len(values) != self.num_completions:
            found, place = part.per_token(found), place[self.sequence_T]
        return values.masked_scatter(place, found)

    def groups(self) -> list[EstimatorInput]:
        """Return each group separately."""
        return self.split(self.group_N.unique_consecutive(return_counts=True)[1].tolist())

    def split(self, sizes: list[int]) -> list[EstimatorInput]:
        """Split into parts of `sizes` completions with copied tensors. Each part has whole
        groups."""
        lengths = self.length_N.long().split(sizes)
        tokens = [int(length.sum()) for length in lengths]

        def parts_of(values: Tensor | None, cut: list[int]) -> list[Tensor | None]:
            if values is None:
                return [None] * len(sizes)
            return [part.clone() for part in values.split(cut)]

        parts = zip(
            self.reward_N.split(sizes), self.penalty_T.split(tokens), lengths,
            self.group_N.split(sizes), self.truncated_N.split(sizes),
            parts_of(self.score_norm_T, tokens), parts_of(self.pilot_N, sizes),
            parts_of(self.coefficient_N2, sizes), strict=True,
        )  # fmt: skip
        return [
            EstimatorInput(
                reward.clone(),
                penalty.clone(),
                torch.arange(len(length), device=length.device).repeat_interleave(length),
                group - group[0],
                truncated.clone(),
                *others,
            )
            for reward, penalty, length, group, truncated, *others in parts
        ]
