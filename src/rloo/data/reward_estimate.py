"""Estimates of how much the rewards of a prompt differ, from the rewards of earlier rollouts."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

# The prior of a prompt counts as this number of completions at least and at most.
PRIOR_STRENGTH = (0.25, 8.0)
# The statistics of all prompts count as this number of completions of a pool.
POOL_STRENGTH = 8.0


class RewardedPrompt(NamedTuple):
    """A prompt of a rollout: its number below N, the weight of its draw, and the rewards of the
    scored completions."""

    number: int
    weight: float
    rewards: list[float]


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

    def copy(self) -> RewardEstimate:
        """Return an estimate that can change independently."""
        other = object.__new__(RewardEstimate)
        other.__dict__.update(self.__dict__)
        other._counts_3N, other._pooled_5C = self._counts_3N.copy(), self._pooled_5C.copy()
        return other

    def add(self, rollout: Iterable[RewardedPrompt]) -> None:
        """Decay all counts, then add the rewards of a rollout. In the pools, the weight of its draw
        multiplies a prompt's counts: pools describe uniformly drawn prompts."""
        self._counts_3N *= self._decay
        self._pooled_5C *= self._decay
        for number, weight, rewards in rollout:
            values = np.array(rewards)
            if not len(values):
                continue
            counts = np.array([len(values), values.sum(), (values**2).sum()])
            within = ((values - values.mean()) ** 2).sum()
            self._counts_3N[:, number] += counts
            self._pooled_5C[:, self._pool_N[number]] += weight * np.array(
                [*counts, len(values) - 1, within]
            )

    def deviations(self) -> np.ndarray:
        """Return the estimated standard deviation of each prompt's reward, (N,); 1 for all prompts
        if no reward is known.

        The mean and the second moment of a prompt are shrunk towards those of its pool. The prior
        counts as W / B completions (Buehlmann's credibility; for rewards of 0 and 1 this is the
        Beta prior with the moments of the pool): W is the variance within prompts, B the variance
        of the prompts' means. With n completions, prior included, the variance of the predicted
        reward contains the uncertainty of the mean; its share n / (n + 1) is the expected variance
        within the prompt. Chances that are proportional to the root of a term's expected square
        give a weighted sum its least variance.
        """
        whole_5 = self._pooled_5C.cumsum(1)[:, -1]
        if whole_5[0] == 0:
            return np.ones(len(self._pool_N))
        pooled_5C = self._pooled_5C + POOL_STRENGTH * (whole_5 / whole_5[0])[:, None]
        mean_C, second_C = pooled_5C[1] / pooled_5C[0], pooled_5C[2] / pooled_5C[0]
        total_C = np.maximum(second_C - mean_C**2, 0.0)
        freedom_C = pooled_5C[3]
        known_C = freedom_C > 0
        within_C = np.where(known_C, pooled_5C[4] / np.where(known_C, freedom_C, 1.0), total_C)
        between_C = np.maximum(total_C - within_C, 0.0)
        lowest, highest = PRIOR_STRENGTH
        strength_C = np.maximum(within_C, lowest * between_C) / np.where(
            between_C > 0, between_C, 1.0
        )
        strength_C = np.where(between_C > 0, np.minimum(strength_C, highest), highest)
        prior_3C = strength_C * np.stack([np.ones_like(mean_C), mean_C, second_C])
        number_N, sum_N, squares_N = self._counts_3N + prior_3C[:, self._pool_N]
        variance_N = np.maximum(squares_N / number_N - (sum_N / number_N) ** 2, 0.0)
        return np.sqrt(variance_N * (number_N / (number_N + 1.0)))

    def state_dict(self) -> dict[str, Any]:
        """Return all counts as JSON values. Prompts without rewards take no space."""
        seen = np.flatnonzero(self._counts_3N[0])
        return {
            "seen": _to_text(seen.astype("<i8")),
            "counts": _to_text(self._counts_3N[:, seen]),
            "pooled": _to_text(self._pooled_5C),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError if it has other pools."""
        pooled = _of_text(state["pooled"], "<f8")
        if pooled.size != self._pooled_5C.size:
            raise ValueError(
                f"the saved position has {pooled.size // 5} values of the column, and the dataset "
                f"has {self._pooled_5C.shape[1]}; resume with the column of the run "
                "(prompt_sampling_kwargs.column, resume_from_checkpoint)"
            )
        self._pooled_5C = pooled.reshape(5, -1)
        seen = _of_text(state["seen"], "<i8")
        self._counts_3N[:] = 0.0
        self._counts_3N[:, seen] = _of_text(state["counts"], "<f8").reshape(3, -1)


def _to_text(values: np.ndarray) -> str:
    little = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode()


def _of_text(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=kind).copy()
