"""Draws prompts in proportion to the estimated deviation of their rewards, with weights that keep
the expected gradient of uniform drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rloo.data.group_budget import GroupBudget
from rloo.data.reward_estimate import RewardedPrompt, RewardEstimate
from rloo.data.sampler import Draw, random_bits
from rloo.types import Group

# A prompt that is drawn several times gets other noise each time. The numbers of draws repeat after
# so many draws, since engines combine them with the prompt's id to 64 bits.
TURNS = 2**22
# The number of a drawn prompt, its weight, and the estimated deviation of its reward.
Chosen = tuple[int, float, float]


class VarianceSampler:
    """Draws each prompt x of a rollout with probability q(x) = floor / N + (1 - floor) * s(x) / sum
    of all s, with replacement. s(x) is the deviation of the prompt's reward that `estimate` has
    after earlier rollouts. A draw of x has the weight 1 / (N q(x)), at most 1 / floor. If the terms
    of a prompt's completions are multiplied by the weight, their expected sum is that of uniform
    drawing, whatever the estimates are.

    `rows` has the id of each of the N prompts (`Prompt.id`). `rewards_of` returns the rewards of a
    group's scored completions. A draw is a function of (`seed`, number of earlier draws,
    estimates), so every process and a resumed run make the same draws.

    `lag`: draws for a rollout use the rewards of all rollouts but the last `lag` before it. If
    rollouts are drawn before the rewards of up to `lag` earlier rollouts are known, draws do not
    depend on the time at which rewards arrive. Each call of `next` is a rollout, and each call of
    `update` has the rewards of the oldest rollout without rewards.

    `budget` divides the completions among the prompts by the same estimates; None: all prompts have
    the same number.
    """

    budget: GroupBudget | None = None

    def __init__(
        self,
        rows: Sequence[int],
        estimate: RewardEstimate,
        rewards_of: Callable[[Group], list[float]],
        *,
        seed: int,
        floor: float,
        lag: int = 0,
    ) -> None:
        self.drawn: int = 0
        self.size: int = len(rows)
        self.seed: int = seed
        self.floor: float = floor
        self.estimate = estimate
        self._number = {row: number for number, row in enumerate(rows)}
        # `estimate` has the rewards of all rollouts but the last `lag`; here are these.
        self._recent: list[list[RewardedPrompt]] = []
        self._rewards_of, self._lag = rewards_of, lag
        # The number of draws with rewards, and of rollouts without.
        self._rewarded, self._ahead = 0, 0

    def next(self, num: int) -> list[Draw]:
        """Draw the `num` prompts of the next rollout, in random order."""
        first, *others = random_bits(num + 1, self.seed, self.drawn)
        chosen = self.choose(num, (int(first) >> 11) / 2**53)
        # Neighbours in the dataset would otherwise be in the same optimizer step.
        drawn = [chosen[old] for old in np.argsort(others, kind="stable")]
        sizes: list[int | None] = [None] * num
        if self.budget is not None and self.budget.pilot is not None:
            sizes = [self.budget.pilot] * num
        elif self.budget is not None:
            sizes = [*self.budget.sizes(np.array([weight * s for _, weight, s in drawn]))]
        draws = [
            Draw(number, (self.drawn + place) % TURNS, weight, size)
            for place, ((number, weight, _), size) in enumerate(zip(drawn, sizes, strict=True))
        ]
        self.drawn += num
        self._ahead += 1
        return draws

    def choose(self, num: int, uniform: float) -> list[Chosen]:
        """Return `num` prompts."""
        deviation_N = self.estimate_for_draw().deviations()
        return self.draw_among(np.arange(self.size), deviation_N, num, uniform)

    def draw_among(
        self, number_M: np.ndarray, deviation_M: np.ndarray, num: int, uniform: float
    ) -> list[Chosen]:
        """Return `num` of the M prompts `number_M`. See `draw_systematically`."""
        share_M = shares_of(deviation_M, self.floor)
        drawn = draw_systematically(share_M, num, uniform)
        return [(int(number_M[i]), weight, float(deviation_M[i])) for i, weight in drawn]

    def estimate_for_draw(self) -> RewardEstimate:
        """Return the estimate with which the next rollout is drawn."""
        usable = len(self._recent) - max(self._lag - self._ahead, 0)
        if usable <= 0:
            return self.estimate
        estimate = self.estimate.copy()
        for rollout in self._recent[:usable]:
            estimate.add(rollout)
        return estimate

    def shares(self) -> np.ndarray:
        """Return N q(x) for each prompt x and the next rollout, (N,)."""
        return shares_of(self.estimate_for_draw().deviations(), self.floor)

    def looked_at(self, number: int) -> Sequence[float | None]:
        """Return what is known of a prompt of the oldest rollout without rewards: nothing."""
        return ()

    def stats(self) -> dict[str, float]:
        """Return metrics: none."""
        return {}

    def update(self, groups: Sequence[Group]) -> None:
        """Receive the rewards of a rollout."""
        self._recent.append(self._rewarded_prompts(groups))
        if len(self._recent) > self._lag:
            self.estimate.add(self._recent.pop(0))
        self._rewarded += len(groups)
        self._ahead = max(self._ahead - 1, 0)

    def second_sizes(self, pilots: Sequence[Group]) -> list[int]:
        """Return the number of further completions of each prompt of the rollout that was drawn
        last. `pilots` are its groups with the completions so far: their rewards count in the
        estimates. The state does not change. Drawn without `lag`."""
        assert self.budget is not None and self._lag == 0
        estimate = self.estimate.copy()
        estimate.add(self._rewarded_prompts(pilots))
        number_P = np.array([self._number[group.prompt.id] for group in pilots])
        weight_P = np.array([group.prompt.weight for group in pilots])
        return self.budget.sizes(weight_P * self.deviations_among(estimate, number_P))

    def deviations_among(self, estimate: RewardEstimate, number_P: np.ndarray) -> np.ndarray:
        """Return the deviations of the prompts `number_P` of the last rollout, by `estimate`."""
        return estimate.deviations()[number_P]

    def _rewarded_prompts(self, groups: Sequence[Group]) -> list[RewardedPrompt]:
        usual = 1 if self.budget is None else self.budget.num_generations
        rollout = []
        for group in groups:
            number, weight = self._number[group.prompt.id], group.prompt.completion_weight(usual)
            looked = self.looked_at(number)
            rollout.append(RewardedPrompt(number, weight, self._rewards_of(group), looked))
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last rollout with rewards. Later rollouts are drawn again
        on resume."""
        return {
            "drawn": self._rewarded,
            "estimate": self.estimate.state_dict(),
            "recent": [[list(prompt) for prompt in rollout] for rollout in self._recent],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. Raises ValueError if `state` has no estimates, or other pools."""
        if "estimate" not in state:
            raise ValueError(
                "prompt_sampling is variance and the saved position has no estimates of rewards; "
                "resume with the prompt_sampling of the run (prompt_sampling, "
                "resume_from_checkpoint)"
            )
        self.estimate.load_state_dict(state["estimate"])
        self._recent = [[RewardedPrompt(*p) for p in rollout] for rollout in state["recent"]]
        self.drawn = self._rewarded = state["drawn"]
        self._ahead = 0


def shares_of(deviation_N: np.ndarray, floor: float) -> np.ndarray:
    """Return N q(x) for N prompts with these deviations, (N,): 1 for all if all deviations are
    0."""
    mean = deviation_N.cumsum()[-1] / len(deviation_N)
    if not mean > 0:
        return np.ones(len(deviation_N))
    return floor + (1.0 - floor) * (deviation_N / mean)


def draw_systematically(share_N: np.ndarray, num: int, uniform: float) -> list[tuple[int, float]]:
    """Return `num` indices in rising order, with their weights (systematic sampling). The
    probability q(x) of index x is share_N[x] / sum of share_N, and its weight is 1 / (N q(x)). If
    `uniform` is uniformly distributed in [0, 1), x is drawn num * q(x) times on average, and always
    this number rounded up or down."""
    bounds_N = share_N.cumsum()
    points_P = (uniform + np.arange(num)) * (bounds_N[-1] / num)
    # Rounding can place the last point behind the last bound.
    index_P = np.minimum(np.searchsorted(bounds_N, points_P, side="right"), len(share_N) - 1)
    weight_P = bounds_N[-1] / len(share_N) / share_N[index_P]
    return list(zip(index_P.tolist(), weight_P.tolist(), strict=True))
