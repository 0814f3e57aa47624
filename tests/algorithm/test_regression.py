"""The regression of returns: its fit, and what it does to the gradient of small policies."""

import itertools
import json
import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.estimators import EstimatorInput, rloo
from rloo.algorithm.regression import (
    STRENGTH,
    Observation,
    ReturnRegression,
    WeightedSums,
    observe,
    pool_of,
    regression,
)
from rloo.config.config import RLOOConfig
from rloo.tools.exact_gradient import TabularPolicy, logits_table, measure
from rloo.types import LEAVE_ONE_OUT, Prompt

GENERATOR = np.random.default_rng(3)


Rows = list[list[tuple[float, float, float]]]


def seen(group) -> list[Observation]:
    """Observations of (weight, return, mean of the others)."""
    return [Observation(weight, value - others, others) for weight, value, others in group]


def random_rollout(number: int = 10, size: int = 4) -> Rows:
    """Groups of completions: (weight, return, mean of the others)."""
    groups = []
    for _ in range(number):
        values = GENERATOR.normal(2.0, 1.5, size)
        others = (values.sum() - values) / (size - 1)
        weights = GENERATOR.exponential(size=size)
        groups.append(list(zip(weights.tolist(), values.tolist(), others.tolist(), strict=True)))
    return groups


def fitted(*rollouts: Rows, half_life=8.0, pool="") -> ReturnRegression:
    found = ReturnRegression()
    for rollout in rollouts:
        found.add([(pool, seen(group)) for group in rollout], half_life)
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
    weight, value, others = np.array(list(chain(*rollout))).T
    slope, constant = np.polyfit(others, value, 1, w=np.sqrt(weight))
    sums = WeightedSums()
    for group in rollout:
        sums.add(seen(group))
    by_group = weight.reshape(-1, 4).sum(1)
    number = by_group.sum() ** 2 / (by_group**2).sum()
    assert sums.num_groups == pytest.approx(number)
    mean = np.average(others, weights=weight)
    level = number / (number + STRENGTH) * (constant + (slope - 1) * mean)
    shrunk = (number - 1) / (number - 1 + STRENGTH) * (slope - 1)
    assert sums.fit(LEAVE_ONE_OUT) == pytest.approx((level - shrunk * mean, shrunk))
    sums.squares /= 1e9  # so much is known that nothing is shrunk
    assert sums.fit(LEAVE_ONE_OUT) == pytest.approx((constant, slope - 1), rel=1e-6)


def test_earlier_rollouts_count_less():
    old, new = random_rollout(), random_rollout()
    halved = [[(0.5 * weight, value, others) for weight, value, others in group] for group in old]
    together, apart = (WeightedSums(), WeightedSums())
    for group in (*halved, *new):
        together.add(seen(group))
    for group in old:
        apart.add(seen(group))
    before = apart.num_groups
    apart.decay(0.5)
    assert apart.num_groups == pytest.approx(before / 2)
    for group in new:
        apart.add(seen(group))
    fields = ("weight", "others", "above", "variance", "covariance")
    expected = [getattr(together, name) for name in fields]
    assert [getattr(apart, name) for name in fields] == pytest.approx(expected)
    assert fitted(old, new, half_life=1.0).coefficients("") == pytest.approx(
        apart.fit(LEAVE_ONE_OUT)
    )


def test_one_group_tells_no_slope():
    """In a group R - m is S - K m, with S the sum of its returns."""
    found = fitted(random_rollout(1)).coefficients("")
    assert found[1] == 0.0 and abs(found[0]) < 1.0
    assert fitted(random_rollout(2)).coefficients("")[1] != 0.0


@pytest.mark.parametrize("size", [4, 16])
def test_few_groups_do_not_raise_the_variance(size):
    """Rewards of 0 and 1 at one prompt a rollout, and at the second rollout of three pools."""
    generator = np.random.default_rng(0)

    def rollout(chances):
        groups = []
        for chance in chances:
            values = (generator.random(size) < chance).astype(float)
            others = (values.sum() - values) / (size - 1)
            groups.append([(1.0, *pair) for pair in zip(values, others, strict=True)])
        return groups

    ratios = {}
    for name, chances in {"one": [0.5], "three": [0.1, 0.5, 0.9]}.items():
        usual = moment = 0.0
        for _ in range(2000):
            fit = ReturnRegression()
            pools = [str(chance) for chance in chances]
            fit.add(zip(pools, map(seen, rollout(chances)), strict=True), 8.0)
            for pool, group in zip(pools, rollout(chances), strict=True):
                for observed in seen(group):
                    one = observed._replace(coefficients=fit.coefficients(pool))
                    usual, moment = usual + one.moments[0], moment + one.moments[1]
        ratios[name] = moment / usual
    assert max(ratios.values()) < 1.1


def test_nothing_seen_is_leave_one_out_and_a_pool_leans_on_all_prompts():
    assert ReturnRegression().coefficients("any") == LEAVE_ONE_OUT
    found = fitted(random_rollout(), pool="easy")
    assert found.coefficients("hard") == found.coefficients("") != LEAVE_ONE_OUT
    assert found.coefficients("easy") != found.coefficients("")


def test_a_pool_that_is_not_seen_any_more_is_forgotten():
    found = fitted(random_rollout(), pool="easy")
    fresh = found.coefficients("easy")
    for _ in range(8 * 8):
        found.add([("hard", seen(group)) for group in random_rollout(1)], half_life=8.0)
    common, late = found.coefficients(""), found.coefficients("easy")
    assert abs(late[1] - common[1]) < 0.02 * abs(fresh[1] - common[1])
    for _ in range(8 * 10):
        found.add([], half_life=8.0)
    assert set(found.state_dict()["pools"]) <= {"hard"}


def test_rewards_that_are_always_equal_keep_advantages_of_exactly_0():
    rollout = [[(weight, 0.3, 0.3) for weight, _, _ in group] for group in random_rollout()]
    found = fitted(*[rollout] * 20).coefficients("")
    assert found == LEAVE_ONE_OUT
    returns = returns_of([0.3, 0.3, 0.3, 0.3], coefficients=found)
    assert not regression(returns).any()


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_rewards_on_another_scale_have_the_same_baseline_on_this_scale(offset):
    rollout = random_rollout()
    far = [[(w, 3 * r + offset, 3 * m + offset) for w, r, m in group] for group in rollout]
    (constant, slope), (far_constant, far_slope) = (
        fitted(some).coefficients("") for some in (rollout, far)
    )
    assert far_slope == pytest.approx(slope, rel=1e-6)
    for others in (-1.0, 0.0, 2.5):
        correction = constant + slope * others
        moved = far_constant + far_slope * (3 * others + offset)
        assert moved == pytest.approx(3 * correction, rel=1e-5, abs=1e-6)


def test_the_variance_ratio_compares_with_leave_one_out():
    found = ReturnRegression()
    assert found.variance_ratio is None
    half = Observation(2.0, 1.0, 0.5, (0.0, 1.0))  # the advantage 0.5 in place of 1
    found.add([("", [half, Observation(1.0, 2.0, 0.0)])], half_life=8.0)
    assert found.variance_ratio == pytest.approx((2 * 0.25 + 4) / (2 + 4))


def test_a_checkpoint_has_the_whole_state():
    found = fitted(random_rollout(), random_rollout(), pool="easy")
    again = ReturnRegression()
    again.load_state_dict(json.loads(json.dumps(found.state_dict())))
    more = [("hard", seen(group)) for group in random_rollout()]
    for one in (found, again):
        one.add(more, half_life=3.0)
    assert again.state_dict() == found.state_dict()
    assert again.coefficients("easy") == found.coefficients("easy")


def test_the_pool_of_a_prompt_is_its_value_of_the_column():
    prompt = Prompt(0, [1], "What is 2 + 2?", columns={"level": 3, "source": "x" * 500})

    def pool(**arguments) -> str:
        return pool_of(prompt, RLOOConfig(estimator="regression", estimator_kwargs=arguments))

    assert [pool(), pool(column="level")] == ["", "3"]
    assert pool(column="prompt") == "'What is 2 + 2?'"
    assert len(pool(column="source")) == 64


def test_a_pilot_is_observed_as_its_advantages_are_computed():
    """Its baselines are computed among the pilot."""
    pilot = torch.tensor([True, True, False, False])
    returns = replace(returns_of([1.0, 0.0, 0.0, 0.5], norms=[0.5] * 8), pilot_N=pilot)
    keys = [(0, index) for index in range(4)]
    above = torch.stack(list(observe(keys, returns).values()))[:, 1]
    estimator = load_estimator(RLOOConfig(estimator="regression"))
    assert above.tolist() == pytest.approx(estimator.advantages(returns).tolist())
    assert above[0] == 1.0


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
