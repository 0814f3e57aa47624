"""Numbers of completions of drawn prompts: the least variance of all, the budget, the bounds."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from rloo.data.group_budget import GroupBudget, allocate
from rloo.data.reward_estimate import RewardEstimate
from rloo.data.variance_sampler import VarianceSampler
from rloo.types import Completion, Group, Prompt


def variance(spread, sizes) -> float:
    return sum(s**2 / (k - 1) for s, k in zip(spread, sizes, strict=True))


@pytest.mark.parametrize("most", [4, 5, 7, 100])
@pytest.mark.parametrize("total", [12, 16, 20])
def test_no_other_numbers_have_a_lower_variance(total, most):
    """Compared with all numbers that there are."""
    if total > 4 * most:
        pytest.skip("more than fit")
    every = [
        sizes
        for sizes in itertools.product(range(2, min(most, total) + 1), repeat=4)
        if sum(sizes) == total
    ]
    random = np.random.default_rng(0)
    for spread in [random.exponential(1.0, 4) for _ in range(5)] + [np.array([0, 0, 1e-9, 3.0])]:
        found = allocate(spread, total, most)
        assert found.sum() == total and found.min() >= 2 and found.max() <= most
        least = min(variance(spread, sizes) for sizes in every)
        assert variance(spread, found) == pytest.approx(least, rel=1e-12)


def test_after_a_pilot_no_other_numbers_have_a_lower_variance_of_the_second_means():
    """In each step of four prompts, of all numbers from 1 to 8 - 2 with this sum."""
    budget = GroupBudget(num_generations=5, max_generations=8, num_prompts=4, pilot=2)
    every = [n for n in itertools.product(range(1, 7), repeat=4) if sum(n) == 4 * 3]
    random = np.random.default_rng(0)
    for _ in range(5):
        spread_P = random.exponential(1.0, 8)
        found = budget.sizes(spread_P)
        for spread, numbers in ((spread_P[:4], found[:4]), (spread_P[4:], found[4:])):
            assert tuple(numbers) in every

            def mean_squares(sizes, spread=spread):
                return sum(s**2 / n for s, n in zip(spread, sizes, strict=True))

            least = min(map(mean_squares, every))
            assert mean_squares(numbers) == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.7, 1e38])
def test_equal_prompts_get_equal_numbers(value):
    assert allocate(np.full(6, value), 24, 16).tolist() == [4] * 6
    assert allocate(np.full(4, value), 10, 16).tolist() == [3, 3, 2, 2]


def test_numbers_less_one_are_in_proportion_to_the_spread():
    """Neyman's allocation, where it is of whole numbers within the bounds."""
    assert allocate(np.array([3.0, 1.0, 9.0, 1.0]), 18, 99).tolist() == [4, 2, 10, 2]


def test_numbers_that_cannot_be_are_refused():
    for total, most in ((5, 9), (13, 4)):
        with pytest.raises(ValueError, match=rf"{total} completions for 3 prompts; each has at le"):
            allocate(np.ones(3), total, most)


def make_sampler(budget: GroupBudget | None, lag: int = 0) -> VarianceSampler:
    estimate = RewardEstimate([""] * 12, half_life=5.0)

    def known(group):
        return [reward for reward in group.rewards if reward is not None]

    sampler = VarianceSampler(list(range(12)), estimate, known, seed=7, floor=1.0, lag=lag)
    sampler.budget = budget
    return sampler


def answer(sampler, draws) -> None:
    """Rows of three kinds: always solved, never solved, solved now and then."""
    groups = []
    for draw in draws:
        size = draw.num_completions or 4
        rewards = [float((True, False, k % 2 == 0)[draw.number % 3]) for k in range(size)]
        members = [Completion([5, 2], "stop", [0.0, 0.0], [0.0, 0.0]) for _ in rewards]
        prompt = Prompt(
            draw.number, [7], "x", weight=draw.weight, num_completions=draw.num_completions
        )
        groups.append(Group(prompt, members, ["x"] * size, rewards))
    sampler.update(groups)


def play(sampler, rollouts: int, ahead: int = 0) -> list:
    drawn = [sampler.next(8) for _ in range(ahead)]
    for number in range(rollouts):
        drawn.append(sampler.next(8))
        answer(sampler, drawn[number])
    return drawn


BUDGET = GroupBudget(num_generations=4, max_generations=8, num_prompts=4)


def test_each_optimizer_step_has_its_number_and_prompts_that_pay_have_most_of_it():
    """Prompts are drawn uniformly here (floor 1): only numbers follow the estimates."""
    first, *later = play(make_sampler(BUDGET), 20)
    assert [draw.num_completions for draw in first] == [4] * 8
    for draws in later:
        for step in (draws[:4], draws[4:]):
            assert sum(draw.num_completions for draw in step) == 16
    means = [
        np.mean([d.num_completions for draws in later[5:] for d in draws if d.number % 3 == kind])
        for kind in range(3)
    ]
    assert means[2] > 1.5 * max(means[:2])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_has_the_same_numbers(lag):
    whole = play(make_sampler(BUDGET, lag), 9, ahead=lag)
    sampler = make_sampler(BUDGET, lag)
    play(sampler, 4, ahead=lag)
    resumed = make_sampler(BUDGET, lag)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    rest = [resumed.next(8) for _ in range(lag)]
    for number in range(5):
        rest.append(resumed.next(8))
        answer(resumed, rest[number])
    assert rest == whole[4:] and len({d.num_completions for draws in rest for d in draws}) > 2


def test_the_prior_does_not_depend_on_numbers_of_completions():
    """A prompt with many completions counts as one prompt among those of its pool."""
    groups = [(0, [1.0, 0.0]), (1, [1.0, 1.0])]
    priors = []
    for times in (1, 4):
        sampler = make_sampler(BUDGET)
        rollout = [
            Group(
                Prompt(row, [7], "x", num_completions=len(rewards) * n),
                [],
                [],
                rewards * n,
            )
            for (row, rewards), n in zip(groups, (times, 1), strict=True)
        ]
        sampler.update(rollout)
        priors.append(sampler.estimate.prior())
    assert priors[0].mean == pytest.approx(priors[1].mean, rel=1e-12)
    assert priors[0].second == pytest.approx(priors[1].second, rel=1e-12)


def test_without_a_budget_all_prompts_have_the_usual_number():
    draws = [draw for draws in play(make_sampler(None), 5) for draw in draws]
    assert {draw.num_completions for draw in draws} == {None}
