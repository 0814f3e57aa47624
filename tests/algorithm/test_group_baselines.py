"""Shrinkage and the length-weighted baseline, beside their definitions in plain Python."""

from __future__ import annotations

from statistics import fmean, variance

import pytest
import torch

from rloo.algorithm.baselines import leave_one_out
from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.group_baselines import length_weighted, shrinkage
from rloo.config.config import RLOOConfig
from rloo.tools.exact_gradient import TabularPolicy, logits_table, measure
from support.terms import changed, make_returns, two_groups


def lists_of(returns: EstimatorInput) -> list[list[float]]:
    """The returns of each group."""
    groups = returns.group_N.tolist()
    pairs = list(zip(groups, returns.return_N.tolist(), strict=True))
    return [[value for group, value in pairs if group == g] for g in dict.fromkeys(groups)]


def baseline_by_definition(groups: list[list[float]], g: int, k: int) -> float:
    """Of completion k of group g, with every mean and variance written out."""
    siblings = groups[g][:k] + groups[g][k + 1 :]
    others = [group for number, group in enumerate(groups) if number != g]
    if not others:
        return fmean(siblings)
    elsewhere = fmean(map(fmean, others))
    if not siblings:
        return elsewhere
    rest = [siblings, *others]
    freedom = sum(len(group) - 1 for group in rest)
    within = sum((x - fmean(group)) ** 2 for group in rest for x in group) / max(freedom, 1)
    noise = within * fmean(1 / len(group) for group in rest)
    between = max(variance(list(map(fmean, rest))) - noise, 0.0)
    ours = within / len(siblings)
    noise_elsewhere = within * fmean(1 / len(group) for group in others)
    theirs = between + (between + noise_elsewhere) / len(others)
    weight = ours / (ours + theirs) if ours else 0.0
    return (1 - weight) * fmean(siblings) + weight * elsewhere


@pytest.mark.parametrize("kl", [True, False])
def test_shrinkage_is_its_definition(kl):
    for seed in range(40):
        returns = make_returns(seed, kl=kl)
        groups = lists_of(returns)
        expected = [
            value - baseline_by_definition(groups, g, k)
            for g, group in enumerate(groups)
            for k, value in enumerate(group)
        ]
        assert shrinkage(returns).tolist() == pytest.approx(expected, abs=1e-12)


def test_shrinkage_by_hand():
    """Groups (0, 1) and (1, 1). Without one of the first two, nothing varies within a group, and
    the baseline is that of leave-one-out."""
    returns = EstimatorInput(
        torch.tensor([0.0, 1.0, 1.0, 1.0]).double(),
        torch.zeros(4).double(),
        torch.arange(4),
        torch.tensor([0, 0, 3, 3]),
        torch.zeros(4, dtype=torch.bool),
    )
    # Without one of the last two, the variance within is 0.5. The means 0.5 and 1 have the variance
    # 0.125, less than their noise 0.5 * (1 + 1/2) / 2: between is 0. The errors are 0.5 and 0.25.
    weight = 0.5 / (0.5 + 0.25)
    last = 1 - (1 - weight) * 1.0 - weight * 0.5
    assert shrinkage(returns).tolist() == pytest.approx([-1, 1, last, last])


def test_equal_returns_have_advantages_of_exactly_0():
    for value in (0.1, 1 / 3, -7.3):
        returns = two_groups([value] * 8, [1, 2, 3, 4, 1, 2, 3, 4])
        assert shrinkage(returns).eq(0).all() and length_weighted(returns).eq(0).all()
    returns = two_groups([0.1] * 4 + [0.7] * 4, [1, 2, 3, 4, 1, 2, 3, 4])
    assert shrinkage(returns).eq(0).all()  # the variance within prompts is 0
    assert length_weighted(returns).eq(0).all()


def test_one_prompt_has_leave_one_out_and_single_completions_the_other_prompts():
    returns = make_returns(3)
    first = returns.groups()[0]
    expected = leave_one_out(first.return_N, torch.zeros_like(first.group_N))
    assert torch.allclose(shrinkage(first), expected, atol=1e-14)
    single = EstimatorInput(
        torch.tensor([1.0, 2.0, 6.0]).double(),
        torch.zeros(3).double(),
        torch.arange(3),
        torch.arange(3),
        torch.zeros(3, dtype=torch.bool),
    )
    assert shrinkage(single).tolist() == pytest.approx([1 - 4, 2 - 3.5, 6 - 1.5])


def test_length_weighted_means_are_those_of_all_their_tokens():
    for seed in range(20):
        returns = make_returns(seed)
        lengths = returns.sequence_T.bincount().tolist()
        groups = returns.group_N.tolist()
        rows = list(zip(groups, returns.return_N.tolist(), lengths, strict=True))
        for leave1out in (True, False):
            found = length_weighted(returns, leave1out).tolist()
            for i, (group, value, _) in enumerate(rows):
                tokens = [
                    r
                    for j, (g, r, length) in enumerate(rows)
                    if g == group and (j != i or not leave1out)
                    for _ in range(length)
                ]
                assert found[i] == pytest.approx(value - fmean(tokens), abs=1e-12)


@pytest.mark.parametrize("estimator", [shrinkage, length_weighted])
def test_a_baseline_does_not_depend_on_its_own_completion(estimator):
    """So that it is exact whatever rewards, lengths and masks are."""
    for seed in range(10):
        returns = make_returns(seed)
        for i in range(returns.num_completions):
            other = changed(returns, i)
            one, two = (x.return_N - estimator(x) for x in (returns, other))
            assert one[i].item() == pytest.approx(two[i].item(), abs=1e-12)
            assert not torch.allclose(one, two, atol=1e-3)  # others see it


def bandit_of(number: int) -> TabularPolicy:
    rewards = torch.cos(torch.arange(3, dtype=torch.float64) * (1 + number)) + number
    return TabularPolicy(logits_table(number, 2), logits_table(number + 1, 2), rewards)


@pytest.mark.parametrize(
    ("prompts", "size", "beta"), [(2, 1, 0.3), (2, 2, 0.0), (2, 2, 0.3), (3, 2, 0.3)]
)
def test_shrinkage_is_exact_over_all_rollouts_of_several_prompts(prompts, size, beta):
    estimator = load_estimator(RLOOConfig(estimator="shrinkage"))
    found = measure(estimator, [bandit_of(n) for n in range(prompts)], size, beta)
    assert [x.error for x in found] == pytest.approx([0.0] * prompts, abs=1e-12)
