"""Advantages from rewards: what an estimator may look at, and those that come with the package.

An estimator is a function of `EstimatorInput` that gives one advantage for each completion, (N,),
or one for each token, (T,). It is given the completions of one group, and so cannot look at others,
unless it says `batch_scope`: then it is given those of the whole rollout, however that is cut into
micro-batches. What is here and looks at groups takes all of them at once, which is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloo.algorithm.baselines import Level, inverse_std, subtract_baseline, whiten
from rloo.algorithm.loss import reward_to_go, sum_by
from rloo.config.estimator_config import PAPER, EstimatorConfig


@dataclass(frozen=True, slots=True)
class EstimatorInput:
    """The scored completions of one group, or of a whole rollout: N of them, of T tokens in all.

    They lie one after another, group by group; the tensors are float64, without gradients.
    `reward_N` are rewards as they are after clipping and scaling, without KL; none is missing.
    `penalty_T` is what each token pays, beta times its KL estimate in nats: 0 where the KL is not
    in the reward. `sequence_T` says to which completion a token belongs, `group_N` to which group a
    completion (on a GPU these are numbered from 0); `truncated_N` whether it hit the length limit.
    """

    reward_N: Tensor
    penalty_T: Tensor
    sequence_T: Tensor
    group_N: Tensor
    truncated_N: Tensor

    @property
    def num_completions(self) -> int:
        """N."""
        return len(self.reward_N)

    @property
    def length_N(self) -> Tensor:
        """Tokens of each completion."""
        return sum_by(torch.ones_like(self.penalty_T), self.sequence_T, self.num_completions)

    @property
    def penalty_N(self) -> Tensor:
        """What each completion pays."""
        return sum_by(self.penalty_T, self.sequence_T, self.num_completions)

    @property
    def return_N(self) -> Tensor:
        """Reward less penalty, the paper's R."""
        return self.reward_N - self.penalty_N

    @property
    def penalty_to_go_T(self) -> Tensor:
        """What each token pays for itself and all later tokens of its completion."""
        return reward_to_go(self.penalty_T, self.sequence_T, self.num_completions)

    def per_token(self, values: Tensor) -> Tensor:
        """Values of completions, or already of tokens, as values of tokens."""
        # If the sizes are equal, every completion is a single token.
        return values if len(values) == len(self.sequence_T) else values[self.sequence_T]

    def select(self, kept_N: Tensor) -> EstimatorInput:
        """Those of the completions that are to be kept, bool (N,)."""
        kept_T = kept_N[self.sequence_T]
        return EstimatorInput(
            self.reward_N[kept_N],
            self.penalty_T[kept_T],
            (kept_N.cumsum(0) - 1)[self.sequence_T[kept_T]],
            self.group_N[kept_N].unique_consecutive(return_inverse=True)[1],
            self.truncated_N[kept_N],
        )

    def groups(self) -> list[EstimatorInput]:
        """Each group alone."""
        return self.split(self.group_N.unique_consecutive(return_counts=True)[1].tolist())

    def split(self, sizes: list[int]) -> list[EstimatorInput]:
        """Parts of so many completions, with tensors of their own; groups are whole in them."""
        lengths = self.length_N.long().split(sizes)
        penalties = self.penalty_T.split([int(length.sum()) for length in lengths])
        columns = [x.split(sizes) for x in (self.reward_N, self.group_N, self.truncated_N)]
        parts = zip(penalties, lengths, *columns, strict=True)
        return [
            EstimatorInput(
                reward.clone(),
                penalty.clone(),
                torch.arange(len(length), device=length.device).repeat_interleave(length),
                group - group[0],
                truncated.clone(),
            )
            for penalty, length, reward, group, truncated in parts
        ]


Estimator = Callable[..., Tensor]
E = TypeVar("E", bound=Callable[..., Any])


def batch_scope(function: E) -> E:
    """Marks an estimator that is to be given the whole rollout, not one group at a time."""
    function.scope = "batch"  # type: ignore[attr-defined]
    return function


def rloo(returns: EstimatorInput) -> Tensor:
    """Each return less the mean of the others of its group: REINFORCE Leave-One-Out (Ahmadian et
    al. 2024, arXiv 2402.14740, equations 5 to 9)."""
    return subtract_baseline(returns.return_N, returns.group_N)


def grpo(returns: EstimatorInput, epsilon: float = 1e-4) -> Tensor:
    """Each return less the mean of its group, itself included, over the group's deviation: GRPO
    (Shao et al. 2024, arXiv 2402.03300, equation 3)."""
    above_N = subtract_baseline(returns.return_N, returns.group_N, mean_leave1out=False)
    return above_N * inverse_std(
        returns.return_N, returns.group_N, std_level="group", epsilon=epsilon
    )


@batch_scope
def reinforce_pp(returns: EstimatorInput, epsilon: float = 1e-8) -> Tensor:
    """Each token's return to come, made mean 0 and deviation 1 over all tokens of the rollout:
    REINFORCE++ without a baseline (Hu 2025, arXiv 2501.03262, as verl computes it); (T,)."""
    come_T = returns.per_token(returns.reward_N) - returns.penalty_to_go_T
    return whiten(come_T, epsilon=epsilon, epsilon_in_variance=True)


def composed(returns: EstimatorInput, form: EstimatorConfig = PAPER) -> Tensor:
    """What the options about advantages and the arguments of this estimator describe: a baseline,
    a deviation, clipping, normalisation, and where the KL is paid; (N,), or (T,) where advantages
    differ by token. The default is `rloo`."""
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
    """(return - baseline) / deviation, (N,) or (T,). `paid_T`: what tokens pay from there on."""
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
        # A token does not pay for the tokens before it.
        paid_before_T = returns.penalty_N[sequence_T] - paid_T
        result = result[sequence_T] + paid_before_T * factor_N[sequence_T]
    return result


ESTIMATORS: dict[str, Estimator] = {
    "composed": composed,
    "rloo": rloo,
    "grpo": grpo,
    "reinforce_pp": reinforce_pp,
}
