"""Draws prompts by predicted rewards: a probe reads features of candidates from the policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rloo.data.reward_estimate import Prior, RewardedPrompt, RewardEstimate
from rloo.data.reward_probe import RewardProbe
from rloo.data.sampler import random_bits
from rloo.data.variance_sampler import Chosen, VarianceSampler

# Candidates and draws use different random numbers. Seeds are below 2 ** 32.
_CANDIDATE_SEED = 2**32


class Predictions(NamedTuple):
    """The estimated deviations of the rewards of M candidates, and the mean rewards that the probe
    and the prior of the pools predict; None without a prediction."""

    deviation_M: np.ndarray
    probe_M: list[Any]
    prior_M: list[Any]


class ProbedEstimate(RewardEstimate):
    """A `RewardEstimate` with a probe that predicts rewards from `size` features of a prompt."""

    def __init__(self, pools: Sequence[Hashable], *, half_life: float, size: int) -> None:
        super().__init__(pools, half_life=half_life)
        self.probe: RewardProbe = RewardProbe(size, half_life=half_life)

    def copy(self) -> Self:
        """Return an estimate that can change independently."""
        other = super().copy()
        other.probe = self.probe.copy()
        return other

    def add(self, rollout: Sequence[RewardedPrompt]) -> None:
        """As `RewardEstimate.add`; the probe learns from the prompts whose features are known."""
        known = [prompt for prompt in rollout if prompt.looked]
        self.probe.add(
            [(p.looked[:-2], p.rewards, p.looked[-2], p.looked[-1]) for p in known], self.moments()
        )
        super().add(rollout)

    def deviations_among(
        self, numbers_M: np.ndarray, features_MD: np.ndarray | None
    ) -> Predictions:
        """Return the estimated deviations of the reward at the prompts `numbers_M`, and the mean
        rewards that the probe and the prior predict. While the probe predicts better than the prior
        of the pools, its predictions are the prior; otherwise features change no deviation, and may
        be None."""
        pools, moments, size = self.prior(), self.moments(), len(numbers_M)
        if pools is None or moments is None:
            return Predictions(np.ones(size), [None] * size, [None] * size)
        usual = prior = pools.among(self.pools(numbers_M))
        found = None if features_MD is None else self.probe.predict(features_MD, moments)
        if found is None:
            return Predictions(self.posterior(numbers_M, usual), [None] * size, usual.mean.tolist())
        mean_M, within_M = found
        if (error := self.probe.error) is not None:
            left_M = np.full(size, max(error - moments.noise, 0.0))
            prior = Prior(mean_M, mean_M**2 + within_M + left_M, within_M, left_M)
        deviation_M = self.posterior(numbers_M, prior)
        return Predictions(deviation_M, mean_M.tolist(), usual.mean.tolist())

    def state_dict(self) -> dict[str, Any]:
        """As `RewardEstimate.state_dict`, with the probe."""
        return super().state_dict() | {"probe": self.probe.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `RewardEstimate.load_state_dict`. Raises ValueError if there is no probe."""
        if "probe" not in state:
            raise ValueError(
                "prompt_sampling_kwargs.probe is set and the saved position has no probe; resume "
                "with the options of the run (prompt_sampling_kwargs.probe, resume_from_checkpoint)"
            )
        super().load_state_dict(state)
        self.probe.load_state_dict(state["probe"])


class ProbeSampler(VarianceSampler):
    """A `VarianceSampler` that draws the prompts of a rollout among candidates:
    `candidates_per_prompt` for each, drawn uniformly without replacement, or all prompts if this is
    None or there are not more.

    `look(numbers)` returns the features (M, D) of prompts as they are now: those of the candidates,
    or of the drawn prompts while predictions are not used. It must be set before the first draw. A
    candidate x is drawn with probability q(x) among the M candidates and has the
    weight 1 / (M q(x)). The expectation over candidates and draws is that of uniform drawing,
    whatever the probe predicts.
    """

    look: Callable[[np.ndarray], np.ndarray]

    def __init__(self, *arguments: Any, candidates_per_prompt: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._candidates_per_prompt = candidates_per_prompt
        # For each rollout without rewards: the features and predictions of its prompts.
        self._looked: deque[dict[int, list[float | None]]] = deque()

    def choose(self, num: int, uniform: float) -> list[Chosen]:
        """Return `num` prompts among candidates."""
        number_M, estimate = self.candidates(num), self.estimate_for_draw()
        assert isinstance(estimate, ProbedEstimate)
        is_used = estimate.probe.error is not None
        feature_MD = self.look(number_M) if is_used else None
        found = estimate.deviations_among(number_M, feature_MD)
        chosen = self.draw_among(number_M, found.deviation_M, num, uniform)
        if feature_MD is None:  # the probe learns from the drawn prompts
            number_M = np.unique([number for number, *_ in chosen])
            feature_MD = self.look(number_M)
            found = estimate.deviations_among(number_M, feature_MD)
        numbers = [number for number, *_ in chosen]
        places = np.searchsorted(number_M, numbers).tolist()  # they are in rising order
        self._looked.append(
            {
                number: [*feature_MD[i].tolist(), found.probe_M[i], found.prior_M[i]]
                for number, i in zip(numbers, places, strict=True)
            }
        )
        return chosen

    def num_candidates(self, num: int) -> int:
        """Return the number of candidates for `num` draws."""
        each = self._candidates_per_prompt
        return self.size if each is None else min(each * num, self.size)

    def candidates(self, num: int) -> np.ndarray:
        """Return the numbers of the candidates for `num` draws, in rising order."""
        size, wanted = self.size, self.num_candidates(num)
        if wanted == size:
            return np.arange(size)
        if wanted * 4 >= size:
            bits = random_bits(size, self.seed + _CANDIDATE_SEED, self.drawn)
            return np.sort(np.argsort(bits, kind="stable")[:wanted])
        # Few of many: twice as many numbers contain enough different ones.
        bits = random_bits(2 * wanted, self.seed + _CANDIDATE_SEED, self.drawn)
        different = list(dict.fromkeys((bits % np.uint64(size)).tolist()))
        return np.sort(np.array(different[:wanted], dtype=np.int64))

    def looked_at(self, number: int) -> list[float | None]:
        """Return the features and predictions of a prompt of the oldest rollout without rewards."""
        return self._looked[0].get(number, []) if self._looked else []

    def deviations_among(self, estimate: RewardEstimate, number_P: np.ndarray) -> np.ndarray:
        """See `VarianceSampler.deviations_among`; by the predictions of the probe, too."""
        assert isinstance(estimate, ProbedEstimate)
        features = [self._looked[-1][int(number)][:-2] for number in number_P]
        return estimate.deviations_among(number_P, np.array(features)).deviation_M

    def update(self, groups: Any) -> None:
        """Receive the rewards of a rollout."""
        super().update(groups)
        if self._looked:
            self._looked.popleft()

    def stats(self) -> dict[str, float]:
        """Return the metrics of the probe, once they are known."""
        estimate = self.estimate
        assert isinstance(estimate, ProbedEstimate)
        values = {
            "prompt_sampling/probe_explained": estimate.probe.explained,
            "prompt_sampling/probe_slope": estimate.probe.slope,
        }
        return {name: float(value) for name, value in values.items() if value == value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`; see `VarianceSampler.load_state_dict`."""
        super().load_state_dict(state)
        self._looked.clear()
