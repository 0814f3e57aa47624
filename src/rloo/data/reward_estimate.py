"""Estimates of how much the rewards of a prompt differ, from the rewards of earlier rollouts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import fsum
from typing import Any, NamedTuple, Self

import numpy as np

from rloo.data.numpy_text import array_of, text_of_array
from rloo.data.reward_probe import Moments

# The prior of a prompt counts as this number of completions at least and at most.
PRIOR_STRENGTH = (0.25, 8.0)
# The statistics of all prompts count as this number of completions of a pool.
POOL_STRENGTH = 8.0


class RewardedPrompt(NamedTuple):
    """A prompt of a rollout: its number below N, the weight of its draw, and the rewards of the
    scored completions. `looked`: see `ProbeSampler.looked_at`."""

    number: int
    weight: float
    rewards: list[float]
    looked: Sequence[float | None] = ()


class Prior(NamedTuple):
    """The mean and the second moment of a reward before any reward of its prompt is known. `within`
    is the variance within a prompt, `between` the variance of the prompts' means."""

    mean: np.ndarray
    second: np.ndarray
    within: np.ndarray
    between: np.ndarray

    @property
    def strength(self) -> np.ndarray:
        """The number of completions that the prior counts as: within / between, in bounds."""
        lowest, highest = PRIOR_STRENGTH
        varies = self.between > 0
        ratio = self.within / np.where(varies, self.between, 1.0)
        return np.where(varies, np.minimum(np.maximum(ratio, lowest), highest), highest)

    def among(self, index_M: np.ndarray) -> Prior:
        """Return the values at these indices."""
        return Prior(*(values[index_M] for values in self))


class RewardEstimate:
    """Decayed counts of each prompt's rewards, and of the rewards of pools of prompts.

    `pools` has the pool of each of the N prompts (any hashable value); the pool of a prompt is its
    prior. Each rollout multiplies all counts by `0.5 ** (1 / half_life)`, because the policy
    changes. All operations are sums in a fixed order, products and square roots, so the estimates
    are equal on all machines.
    """

    def __init__(self, pools: Sequence[Hashable], *, half_life: float) -> None:
        numbers = {pool: number for number, pool in enumerate(dict.fromkeys(pools))}
        self._pool_N = np.array([numbers[pool] for pool in pools], dtype=np.int64)
        self._decay = 0.5 ** (1.0 / half_life)
        # Number, sum and sum of squares of each prompt's rewards.
        self._counts_3N = np.zeros((3, len(pools)))
        # The same of each pool, degrees of freedom, and the sum of squares within groups.
        self._pooled_5C = np.zeros((5, len(numbers)))

    def copy(self) -> Self:
        """Return an estimate that can change independently."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._counts_3N, other._pooled_5C = self._counts_3N.copy(), self._pooled_5C.copy()
        return other

    def add(self, rollout: Sequence[RewardedPrompt]) -> None:
        """Decay all counts, then add the rewards of a rollout. In the pools, the weight of its draw
        multiplies a prompt's counts: pools describe uniformly drawn prompts."""
        self._counts_3N *= self._decay
        self._pooled_5C *= self._decay
        for number, weight, rewards, _ in rollout:
            size, total = len(rewards), fsum(rewards)
            if not size:
                continue
            mean = total / size
            squares = fsum(reward * reward for reward in rewards)
            within = fsum((reward - mean) * (reward - mean) for reward in rewards)
            sums = np.array([size, total, squares, size - 1, within])
            self._counts_3N[:, number] += sums[:3]
            self._pooled_5C[:, self._pool_N[number]] += weight * sums

    def prior(self) -> Prior | None:
        """Return the prior of each pool; None if no reward is known.

        The prior of a pool counts as W / B completions (Buehlmann's credibility; for rewards of 0
        and 1 this is the Beta prior with the moments of the pool): W is the variance within
        prompts, B the variance of the prompts' means.
        """
        whole_5 = self._pooled_5C.cumsum(1)[:, -1]
        if whole_5[0] == 0:
            return None
        pooled_5C = self._pooled_5C + POOL_STRENGTH * (whole_5 / whole_5[0])[:, None]
        mean_C, second_C = pooled_5C[1] / pooled_5C[0], pooled_5C[2] / pooled_5C[0]
        total_C = np.maximum(second_C - mean_C**2, 0.0)
        freedom_C = pooled_5C[3]
        known_C = freedom_C > 0
        within_C = np.where(known_C, pooled_5C[4] / np.where(known_C, freedom_C, 1.0), total_C)
        return Prior(mean_C, second_C, within_C, np.maximum(total_C - within_C, 0.0))

    def deviations(self) -> np.ndarray:
        """Return the estimated standard deviation of each prompt's reward, (N,); 1 for all prompts
        if no reward is known."""
        prior = self.prior()
        if prior is None:
            return np.ones(len(self._pool_N))
        return self.posterior(np.arange(len(self._pool_N)), prior.among(self._pool_N))

    def posterior(self, numbers_M: np.ndarray, prior: Prior) -> np.ndarray:
        """Return the estimated standard deviation of the reward at the prompts `numbers_M`, (M,).
        `prior` has a value for each of these prompts.

        The mean and the second moment of a prompt are shrunk towards those of the prior. With n
        completions, prior included, the variance of the predicted reward contains the uncertainty
        of the mean; its share n / (n + 1) is the expected variance within the prompt. Chances that
        are proportional to the root of a term's expected square give a weighted sum its least
        variance.
        """
        strength_M = prior.strength
        counts_3M = self._counts_3N[:, numbers_M]
        number_M = counts_3M[0] + strength_M
        mean_M = (counts_3M[1] + strength_M * prior.mean) / number_M
        second_M = (counts_3M[2] + strength_M * prior.second) / number_M
        variance_M = np.maximum(second_M - mean_M**2, 0.0)
        return np.sqrt(variance_M * (number_M / (number_M + 1.0)))

    def moments(self) -> Moments | None:
        """Return the moments of the rewards of uniformly drawn prompts; None if no reward is
        known."""
        number, total, squares, freedom, within = self._pooled_5C.cumsum(1)[:, -1].tolist()
        if number == 0:
            return None
        mean, groups = total / number, number - freedom
        variance = max(squares / number - mean**2, 0.0)
        inner = within / freedom if freedom > 0 else variance
        size = number / groups if groups > 0 else 1.0
        return Moments(mean, inner, max(variance - inner, 0.0), size)

    def pools(self, numbers_M: np.ndarray) -> np.ndarray:
        """Return the number of the pool of each prompt."""
        return self._pool_N[numbers_M]

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as JSON values. Prompts without rewards take no space."""
        seen = np.flatnonzero(self._counts_3N[0])
        return {
            "seen": text_of_array(seen.astype("<i8")),
            "counts": text_of_array(self._counts_3N[:, seen]),
            "pooled": text_of_array(self._pooled_5C),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError if it has other pools."""
        pooled = array_of(state["pooled"], "<f8")
        if pooled.size != self._pooled_5C.size:
            raise ValueError(
                f"the saved position has {pooled.size // 5} values of the column, and the dataset "
                f"has {self._pooled_5C.shape[1]}; resume with the column of the run "
                "(prompt_sampling_kwargs.column, resume_from_checkpoint)"
            )
        self._pooled_5C = pooled.reshape(5, -1)
        seen = array_of(state["seen"], "<i8")
        self._counts_3N[:] = 0.0
        self._counts_3N[:, seen] = array_of(state["counts"], "<f8").reshape(3, -1)
