"""The baseline of least variance that is linear in the mean of the other returns of the group. Its
coefficients are fitted on earlier rollouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo.algorithm.baselines import group_sum, leave_one_out, subtract_baseline
from rloo.algorithm.estimator_input import EstimatorInput, reads_score_norms
from rloo.algorithm.ragged import sum_by
from rloo.config.options import TrainingOptions
from rloo.types import LEAVE_ONE_OUT, Coefficients, Prompt

Key = tuple[int, int]

HALF_LIFE = 8.0
# The fit counts as half known after so many groups of equal weight.
STRENGTH = 8.0
# A pool with fewer groups is forgotten: it has the coefficients of all prompts.
_FEWEST = 1e-3
# A variance of the mean below this share of its squared value is a rounding error.
_ROUNDING = 1e-20
_LONGEST_NAME = 64


@reads_score_norms
def regression(
    returns: EstimatorInput, column: str | None = None, half_life: float = HALF_LIFE
) -> Tensor:
    """Return the advantages (N,): each completion's return R_i minus a + (1 + d) m_i, where m_i is
    the mean of the other returns of its group. `EstimatorInput.coefficient_N2` has a and d, which
    `ReturnRegression` fitted on earlier rollouts. a and d do not depend on this rollout, and m_i
    does not depend on completion i, so the expected gradient is exact.

    The expected squared norm of the gradient is E[w (R - b)^2], with w the squared norm of the
    gradient of log p(completion), up to terms between completions. It is least for the regression
    of R weighted with w (for a constant b: Weaver and Tao 2001; Greensmith et al. 2004). w is
    approximated by the sum of the completion's `EstimatorInput.score_norm_T`.

    `column`: prompts with different values of this dataset column have coefficients of their own.
    `half_life`: after this number of rollouts, the weight of a rollout in the fit is one half.
    Without coefficients the baseline is leave-one-out's. The advantage is 0 in a group of one.
    """
    above_N = leave_one_out(returns.return_N, returns.group_N)
    if returns.coefficient_N2 is None:
        return above_N
    constant_N, slope_N = returns.coefficient_N2.unbind(1)
    others_N = returns.return_N - above_N
    number_N = group_sum(torch.ones_like(above_N), returns.group_N)[returns.group_N]
    return torch.where(number_N > 1, above_N - constant_N - slope_N * others_N, 0.0)


def column_of(config: TrainingOptions) -> str | None:
    """Return `estimator_kwargs.column`."""
    return (config.estimator_kwargs or {}).get("column")


def pool_of(prompt: Prompt, config: TrainingOptions) -> str:
    """Return the pool of a prompt: its value of `estimator_kwargs.column`; empty without
    `column`."""
    column = column_of(config)
    if column is None:
        return ""
    name = repr(prompt.content if column == "prompt" else prompt.columns.get(column))
    return name if len(name) <= _LONGEST_NAME else hashlib.sha256(name.encode()).hexdigest()


def half_life_of(config: TrainingOptions) -> float:
    """Return `estimator_kwargs.half_life`, in rollouts."""
    return float((config.estimator_kwargs or {}).get("half_life", HALF_LIFE))


class Observation(NamedTuple):
    """The values of a completion that the regression reads: w, R - m and m. `coefficients` are
    those of its baseline."""

    weight: float
    above: float
    others: float
    coefficients: Coefficients = LEAVE_ONE_OUT

    @property
    def moments(self) -> tuple[float, float]:
        """w (R - m)^2, and w times its squared advantage."""
        constant, slope = self.coefficients
        advantage = self.above - constant - slope * self.others
        return self.weight * self.above**2, self.weight * advantage**2


def observe(keys: Sequence[Key], returns: EstimatorInput) -> dict[Key, Tensor]:
    """Return w, R - m and m of each completion, (3,), by its key; 0 for completions without a
    reward. m of a completion of a pilot is that among the pilot."""
    assert returns.score_norm_T is not None
    # 0 for a missing return.
    above_N = returns.compute(lambda part: subtract_baseline(part.return_N, part.group_N))
    weight_N = sum_by(returns.score_norm_T.clamp(min=0.0), returns.sequence_T, len(above_N))
    scored_N = ~returns.return_N.isnan()
    rows = torch.stack([weight_N, above_N, returns.return_N - above_N], dim=1)
    return dict(zip(keys, torch.where(scored_N[:, None], rows, 0.0).unbind(), strict=True))


@dataclass(slots=True)
class WeightedSums:
    """Decayed statistics of completions: `weight` is the sum of w, and `squares` the sum over
    groups of their squared weights. `others` and `above` are the weighted means of m and R - m,
    `variance` and `covariance` the sums of w (m - mean)^2 and w (m - mean) (R - m - mean)."""

    weight: float = 0.0
    squares: float = 0.0
    others: float = 0.0
    above: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0

    @property
    def num_groups(self) -> float:
        """The effective number of groups. The statistics of old ones count less. Within a group
        R - m = S - K m, with S the sum of its returns, so its completions tell no slope."""
        return self.weight**2 / self.squares if self.squares > 0.0 else 0.0

    def decay(self, factor: float) -> None:
        """Multiply the weights of all completions by `factor`."""
        self.weight *= factor
        self.squares *= factor
        self.variance *= factor
        self.covariance *= factor

    def add(self, group: Sequence[Observation]) -> None:
        """Add the completions of a group."""
        self.squares += sum(seen.weight for seen in group) ** 2
        for seen in group:
            if seen.weight > 0.0:
                others, above = seen.others - self.others, seen.above - self.above
                share = seen.weight / (self.weight + seen.weight)
                self.variance += self.weight * share * others * others
                self.covariance += self.weight * share * others * above
                self.others += share * others
                self.above += share * above
                self.weight += seen.weight

    def fit(self, prior: Coefficients) -> Coefficients:
        """Return the regression of R - m on m. Its slope and its value at the mean of m are shrunk
        towards `prior` by the number of groups; a single group tells no slope."""
        number = self.num_groups
        constant, slope = prior
        level = constant + slope * self.others
        level += number / (number + STRENGTH) * (self.above - level)
        if self.variance > _ROUNDING * self.weight * self.others**2:
            free = max(number - 1.0, 0.0)
            slope += free / (free + STRENGTH) * (self.covariance / self.variance - slope)
        return level - slope * self.others, slope


class ReturnRegression:
    """Regressions of returns on the mean of the other returns, over earlier rollouts: one over all
    prompts, and one for each pool of prompts. A pool is shrunk towards all prompts, and all prompts
    towards leave-one-out. All processes add the same observations in the same order."""

    def __init__(self) -> None:
        self._common = WeightedSums()
        self._pools: dict[str, WeightedSums] = {}
        # Decayed sums of `Observation.moments`.
        self._moments = [0.0, 0.0]

    @property
    def variance_ratio(self) -> float | None:
        """The weighted squared advantages of the last rollouts, relative to those of leave-one-out;
        None if these are all 0."""
        usual, ours = self._moments
        return ours / usual if usual > 0.0 else None

    def coefficients(self, pool: str) -> Coefficients:
        """Return a and d for prompts of `pool`: the baseline is a + (1 + d) m."""
        common = self._common.fit(LEAVE_ONE_OUT)
        return self._pools[pool].fit(common) if pool in self._pools else common

    def add(self, rollout: Iterable[tuple[str, Sequence[Observation]]], half_life: float) -> None:
        """Decay all statistics, then add the groups of a rollout, each with its pool."""
        factor = 0.5 ** (1.0 / half_life)
        self._moments = [value * factor for value in self._moments]
        for sums in (self._common, *self._pools.values()):
            sums.decay(factor)
        for pool, group in rollout:
            self._common.add(group)
            if pool:
                self._pools.setdefault(pool, WeightedSums()).add(group)
            for seen in group:
                self._moments = [m + s for m, s in zip(self._moments, seen.moments, strict=True)]
        self._pools = {p: sums for p, sums in self._pools.items() if sums.num_groups > _FEWEST}

    def state_dict(self) -> dict[str, Any]:
        """Return all statistics as JSON values."""
        pools = {pool: astuple(sums) for pool, sums in self._pools.items()}
        return {"common": astuple(self._common), "pools": pools, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._common = WeightedSums(*state["common"])
        self._pools = {pool: WeightedSums(*sums) for pool, sums in state["pools"].items()}
        self._moments = list(state["moments"])
