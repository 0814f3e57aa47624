"""The regression of returns: its fit, and what it does to the gradient of small policies."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.estimators import EstimatorInput, rloo
from rloo.algorithm.regression import (
    STRENGTH,
    Observation,
    ReturnRegression,
    observe,
    regression,
)
from rloo.config.config import RLOOConfig
from rloo.tools.exact_gradient import TabularPolicy, logits_table, measure
from rloo.types import LEAVE_ONE_OUT

GENERATOR = np.random.default_rng(3)


def seen(weight: float, value: float, others: float) -> Observation:
    return Observation(weight, value - others, others, LEAVE_ONE_OUT)


def random_rollout(number: int = 40) -> list[tuple[float, float, float]]:
    columns = GENERATOR.exponential(size=number), *GENERATOR.normal(2.0, 1.5, (2, number))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def fitted(*rollouts, half_life=8.0, pool="") -> ReturnRegression:
    found = ReturnRegression()
    for rollout in rollouts:
        found.add([(pool, seen(*values)) for values in rollout], half_life)
    return found


def returns_of(values, *, group=(0, 0, 0, 0), norms=None, coefficients=None) -> EstimatorInput:
    """Completions of two tokens each."""
    number = len(values)
    tokens = torch.arange(number).repeat_interleave(2)
    norm_T = None if norms is None else torch.tensor(norms, dtype=torch.float64)
    rows = None if coefficients is None else [coefficients] * number
    given = None if rows is None else torch.tensor(rows, dtype=torch.float64)
    return EstimatorInput(
        torch.tensor(values, dtype=torch.float64), torch.zeros(2 * number).double(), tokens,
        torch.tensor(group), torch.zeros(number, dtype=torch.bool), norm_T, None, given,
    )  # fmt: skip


def test_the_advantage_is_the_return_minus_a_line_of_the_mean_of_the_others():
    returns = returns_of([1.0, 0.0, 0.5, 0.5], coefficients=(0.2, -0.5))
    others = [1 / 3, 2 / 3, 0.5, 0.5]
    expected = [r - (0.2 + 0.5 * m) for r, m in zip([1.0, 0.0, 0.5, 0.5], others, strict=True)]
    assert regression(returns).tolist() == pytest.approx(expected, abs=1e-15)


def test_without_coefficients_it_is_leave_one_out_to_the_last_bit():
    returns = returns_of([0.1, 0.7, 0.2, 0.9])
    assert torch.equal(regression(returns), rloo(returns))
    zero = returns_of([0.1, 0.7, 0.2, 0.9], coefficients=LEAVE_ONE_OUT)
    assert torch.equal(regression(zero), rloo(returns))


def test_a_group_of_one_has_no_advantage():
    returns = returns_of([3.0, 1.0, 0.0], group=(0, 1, 1), coefficients=(0.2, -0.5))
    assert regression(returns).tolist() == pytest.approx([0.0, 0.8, -0.7])


def test_what_is_observed_of_completions():
    norms = [0.5, 0.25, 1.0, -1e-9, 0.1, 0.1, 0.3, 0.3]
    keys = [(3, index) for index in range(4)]
    found = observe(keys, returns_of([1.0, 0.0, math.nan, 0.25], norms=norms))
    expected = [[0.75, 0.875, 0.125], [1.0, -0.625, 0.625], [0, 0, 0], [0.6, -0.25, 0.5]]
    assert list(found) == keys
    assert torch.stack(list(found.values())).numpy() == pytest.approx(np.array(expected))


def test_the_fit_is_the_weighted_regression_of_another_program():
    rollout = random_rollout()
    weight, value, others = np.array(rollout).T
    slope, constant = np.polyfit(others, value, 1, w=np.sqrt(weight))
    share = weight.sum() ** 2 / (weight**2).sum()
    share /= share + STRENGTH
    expected = share * constant, share * (slope - 1)
    assert fitted(rollout).coefficients("") == pytest.approx(expected)


def test_earlier_rollouts_count_less():
    old, new = random_rollout(), random_rollout()
    halved = [(0.5 * weight, value, others) for weight, value, others in old]
    together = fitted(halved + new).coefficients("")
    assert fitted(old, new, half_life=1.0).coefficients("") == pytest.approx(together)
    assert fitted(old, new, half_life=50.0).coefficients("") != pytest.approx(together)


def test_nothing_seen_is_leave_one_out_and_a_pool_leans_on_all_prompts():
    assert ReturnRegression().coefficients("any") == LEAVE_ONE_OUT
    found = fitted(random_rollout(), pool="easy")
    assert found.coefficients("hard") == found.coefficients("") != LEAVE_ONE_OUT
    assert found.coefficients("easy") != found.coefficients("")
    alone = fitted(random_rollout(number=1), pool="easy").coefficients("easy")
    assert alone[1] == 0.0  # one completion tells no slope


def test_rewards_that_are_always_equal_keep_advantages_of_exactly_0():
    rollout = [(weight, 0.3, 0.3) for weight, _, _ in random_rollout()]
    found = fitted(*[rollout] * 20).coefficients("")
    assert found == LEAVE_ONE_OUT
    returns = returns_of([0.3, 0.3, 0.3, 0.3], coefficients=found)
    assert not regression(returns).any()


def test_rewards_on_another_scale_have_the_same_baseline_on_this_scale():
    rollout = random_rollout()
    far = [(weight, 3 * value + 1e4, 3 * others + 1e4) for weight, value, others in rollout]
    (constant, slope), (far_constant, far_slope) = (
        fitted(some).coefficients("") for some in (rollout, far)
    )
    assert far_slope == pytest.approx(slope, rel=1e-5)
    for others in (-1.0, 0.0, 2.5):
        baseline = constant + (1 + slope) * others
        moved = far_constant + (1 + far_slope) * (3 * others + 1e4)
        assert moved == pytest.approx(3 * baseline + 1e4, rel=1e-8)


def test_the_variance_ratio_compares_with_leave_one_out():
    found = ReturnRegression()
    assert found.variance_ratio == 1.0
    half = Observation(2.0, 1.0, 0.5, (0.0, 1.0))  # the advantage 0.5 in place of 1
    whole = Observation(1.0, 2.0, 0.0, LEAVE_ONE_OUT)
    found.add([("", half), ("", whole)], half_life=8.0)
    assert found.variance_ratio == pytest.approx((2 * 0.25 + 4) / (2 + 4))


def test_a_checkpoint_has_the_whole_state():
    found = fitted(random_rollout(), random_rollout(), pool="easy")
    again = ReturnRegression()
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    more = [("hard", seen(*values)) for values in random_rollout()]
    for one in (found, again):
        one.add(more, half_life=3.0)
    assert again.state_dict() == found.state_dict()
    assert again.coefficients("easy") == found.coefficients("easy")


def policy(rewards: list[float]) -> TabularPolicy:
    num_tokens = 3
    tables = [logits_table(number, num_tokens) for number in (4, 5)]
    return TabularPolicy(*tables, torch.tensor(rewards, dtype=torch.float64))


REWARDS = {
    "rare failure": [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0],
    "rare success": [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
    "graded": [0.1, 1.0, 0.3, 0.0, -0.5, 2.0, 0.7],
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", REWARDS)
def test_the_fitted_line_has_the_least_variance_of_all_lines(name, size):
    """Exact enumeration: the variance of the gradient of groups, for lines around the fitted one.
    Terms between completions, which the regression leaves out, are a few percent."""
    estimator, bandit = load_estimator(RLOOConfig(estimator="regression")), policy(REWARDS[name])

    def variance(coefficients=None) -> float:
        (found,) = measure(estimator, [bandit], size, 0.0, coefficients=coefficients)
        assert found.error < 1e-12  # whatever the coefficients are
        return found.variance

    least = variance()
    grid = itertools.product((-0.4, -0.1, 0.0, 0.1, 0.4), (-1.5, -1.0, -0.5, 0.0))
    assert least < 1.05 * min(variance(line) for line in grid)
    assert least < 0.9 * variance(LEAVE_ONE_OUT)
