"""Enumerates the draws of a `ProbeSampler`: every set of candidates, and every draw among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from rloo.data.probe_sampler import ProbedEstimate, ProbeSampler
from rloo.data.variance_sampler import shares_of
from rloo.model.probe_state import CANDIDATES
from rloo.tools.exact_gradient import constant_intervals, scored_rewards
from rloo.types import Group, Prompt

# The features of a prompt determine its rewards, or are those of all prompts, or, at the draw, are
# those of the next prompt.
PROBES = ("knows", "knows nothing", "is wrong")
_ROLLOUTS, _SEEN = 20, 4


class GivenCandidates(ProbeSampler):
    """A `ProbeSampler` whose candidates are `given`."""

    given: np.ndarray

    def candidates(self, num: int) -> np.ndarray:
        """Return the candidates that are given."""
        return self.given


def make_probe_sampler(
    probe: str, size: int, *, floor: float, each: int | None = CANDIDATES
) -> GivenCandidates:
    """Return a sampler of `size` prompts after rollouts of the first four. The rewards of prompts
    with even numbers differ, all others are 0. `probe` is one of `PROBES`. `each`: candidates per
    prompt."""
    estimate = ProbedEstimate([""] * size, half_life=20.0, size=2)
    sampler = GivenCandidates(
        range(size), estimate, scored_rewards, seed=0, floor=floor, candidates_per_prompt=each
    )
    number_N = np.arange(size)
    feature_ND = np.stack([number_N % 2 == 0, np.sin(number_N)], 1).astype(np.float64)
    if probe == "knows nothing":
        feature_ND = np.ones_like(feature_ND)
    sampler.look = lambda number_M: feature_ND[number_M]
    sampler.given = number_N[:_SEEN]
    for _ in range(_ROLLOUTS):
        sampler.update([_rewarded(draw.number, draw.weight) for draw in sampler.next(_SEEN)])
    if probe == "is wrong":
        sampler.look = lambda number_M: feature_ND[(number_M + 1) % size]
    return sampler


def all_probe_draws(
    sampler: GivenCandidates, num: int
) -> Iterator[tuple[float, list[tuple[int, float]]]]:
    """Yield every outcome of `num` draws, as `all_draws` does. Each set of candidates has the same
    probability."""
    size = sampler.num_candidates(num)
    sets = list(itertools.combinations(range(sampler.size), size))
    for chosen in sets:
        sampler.given = np.array(chosen)
        estimate = sampler.estimate_for_draw()
        assert isinstance(estimate, ProbedEstimate)
        found = estimate.deviations_among(sampler.given, sampler.look(sampler.given))
        for low, high in constant_intervals(shares_of(found.deviation_M, sampler.floor), num):
            draws = sampler.choose(num, (low + high) / 2)
            yield (high - low) / len(sets), [(number, weight) for number, weight, _ in draws]


def _rewarded(number: int, weight: float) -> Group:
    rewards: list[float | None] = [float(number % 2 == 0 and k % 2 == 0) for k in range(4)]
    return Group(Prompt(number, [0], "", weight=weight), [], [], rewards)
