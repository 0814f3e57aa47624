"""The baseline of least variance that is linear in the mean of the other returns of the group. Its
coefficients are fitted on earlier rollouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rloo.algorithm.baselines import group_sum, leave_one_out, subtract_baseline
from rloo.algorithm.estimator_input import EstimatorInput, reads_coefficients
from rloo.algorithm.ragged import sum_by
from rloo.config.options import TrainingOptions
from rloo.types import LEAVE_ONE_OUT, Coefficients, Prompt

Key = tuple[int, int]

HALF_LIFE = 8.0
# The fit counts as half known after so many completions of equal weight.
STRENGTH = 8.0
# A variance of the mean below this share of its second moment is a rounding error.
_ROUNDING = 1e-12


@reads_coefficients
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


def pool_of(prompt: Prompt, config: TrainingOptions) -> str:
    """Return the pool of a prompt: its value of `estimator_kwargs.column`; empty without
    `column`."""
    column = (config.estimator_kwargs or {}).get("column")
    return "" if column is None else repr(prompt.columns.get(column))


def half_life_of(config: TrainingOptions) -> float:
    """Return `estimator_kwargs.half_life`, in rollouts."""
    return float((config.estimator_kwargs or {}).get("half_life", HALF_LIFE))


class Observation(NamedTuple):
    """What the regression reads of a completion: w, R - m and m. `coefficients` are those of its
    baseline."""

    weight: float
    above: float
    others: float
    coefficients: Coefficients

    @property
    def moments(self) -> tuple[float, float]:
        """w (R - m)^2, and w times its squared advantage."""
        constant, slope = self.coefficients
        advantage = self.above - constant - slope * self.others
        return self.weight * self.above**2, self.weight * advantage**2


def observe(keys: Sequence[Key], returns: EstimatorInput) -> dict[Key, Tensor]:
    """Return w, R - m and m of each completion, (3,), by its key; 0 for completions without a
    reward."""
    assert returns.score_norm_T is not None
    above_N = subtract_baseline(returns.return_N, returns.group_N)  # 0 for a missing return
    weight_N = sum_by(returns.score_norm_T.clamp(min=0.0), returns.sequence_T, len(above_N))
    scored_N = ~returns.return_N.isnan()
    rows = torch.stack([weight_N, above_N, returns.return_N - above_N], dim=1)
    return dict(zip(keys, torch.where(scored_N[:, None], rows, 0.0).unbind(), strict=True))


@dataclass(slots=True)
class WeightedSums:
    """Decayed sums over completions: of the weights w, of w^2, and of w times m, m^2, R - m, and
    m (R - m)."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 6)

    def decay(self, factor: float) -> None:
        """Multiply all weights by `factor`."""
        self.sums = [value * factor for value in self.sums]
        self.sums[1] *= factor

    def add(self, seen: Observation) -> None:
        """Add a completion."""
        above, others = seen.above, seen.others
        terms = (1.0, seen.weight, others, others * others, above, others * above)
        self.sums = [s + seen.weight * term for s, term in zip(self.sums, terms, strict=True)]

    def fit(self, prior: Coefficients) -> Coefficients:
        """Return the regression of R - m on m, shrunk towards `prior` by the effective number of
        completions: (sum of w)^2 / sum of w^2."""
        total, squares, *products = self.sums
        if not squares > 0.0:
            return prior
        mean, second, above, mixed = (value / total for value in products)
        variance = second - mean * mean
        slope = (mixed - mean * above) / variance if variance > _ROUNDING * second else 0.0
        constant = above - slope * mean
        known = total * total / squares
        share = known / (known + STRENGTH)
        return prior[0] + share * (constant - prior[0]), prior[1] + share * (slope - prior[1])


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
    def variance_ratio(self) -> float:
        """The weighted squared advantages of the last rollouts, relative to those of leave-one-out;
        1 if these are all 0."""
        usual, ours = self._moments
        return ours / usual if usual > 0.0 else 1.0

    def coefficients(self, pool: str) -> Coefficients:
        """Return a and d for prompts of `pool`: the baseline is a + (1 + d) m."""
        common = self._common.fit(LEAVE_ONE_OUT)
        return self._pools[pool].fit(common) if pool in self._pools else common

    def add(self, rollout: Iterable[tuple[str, Observation]], half_life: float) -> None:
        """Decay all sums, then add the completions of a rollout, each with the pool of its
        prompt."""
        factor = 0.5 ** (1.0 / half_life)
        self._moments = [value * factor for value in self._moments]
        for sums in (self._common, *self._pools.values()):
            sums.decay(factor)
        for pool, seen in rollout:
            self._moments = [m + more for m, more in zip(self._moments, seen.moments, strict=True)]
            self._common.add(seen)
            if pool:
                self._pools.setdefault(pool, WeightedSums()).add(seen)

    def state_dict(self) -> dict[str, Any]:
        """Return all sums as JSON values."""
        pools = {pool: of_pool.sums for pool, of_pool in self._pools.items()}
        return {"common": self._common.sums, "pools": pools, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._common = WeightedSums(list(state["common"]))
        self._pools = {pool: WeightedSums(list(sums)) for pool, sums in state["pools"].items()}
        self._moments = list(state["moments"])
