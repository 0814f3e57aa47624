"""Means and deviations by group or over all, against hand computations and exact fractions."""

import math
import random
import statistics
from fractions import Fraction

import pytest
import torch

from rloo.algorithm.baselines import inverse_std, leave_one_out, subtract_baseline, whiten

NAN = math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def advantages_of(rewards, groups, *, std_level="none", normalize=False, epsilon=1e-4, **mean):
    result = subtract_baseline(rewards, groups, **mean)
    result = result * inverse_std(rewards, groups, std_level=std_level, epsilon=epsilon)
    missing = rewards.isnan()
    if normalize:
        result = whiten(torch.where(missing, NAN, result), epsilon=epsilon)
    return result


def one_group(*rewards: float) -> list[float]:
    return subtract_baseline(tensor(*rewards), torch.zeros(len(rewards)).long()).tolist()


def test_leave_one_out_by_hand():
    assert one_group(1, 2, 3) == [-1.5, 0, 1.5]
    assert one_group(1, 0) == [1, -1]
    assert one_group(1, 1, 1, 0, 0, 0, 0, 0)[0] == pytest.approx(5 / 7)
    assert one_group(1, 1, 1, 0, 0, 0, 0, 0)[3] == pytest.approx(-3 / 7)


def test_leave_one_out_alone_is_the_default_baseline_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 50):
        for dtype in (torch.float32, torch.float64):
            rewards = torch.randn(size, generator=generator, dtype=dtype)
            groups = torch.randint(0, 12, (size,), generator=generator)
            found = leave_one_out(rewards, groups)
            assert torch.equal(found, subtract_baseline(rewards, groups)) and found.dtype is dtype
    assert leave_one_out(tensor(1, 2, 3, 7), torch.tensor([0, 0, 0, 1])).tolist() == [
        -1.5,
        0,
        1.5,
        0,
    ]
    assert leave_one_out(tensor(*[0.1] * 7), torch.zeros(7).long()).tolist() == [0.0] * 7


def test_missing_reward_leaves_the_baseline_of_its_siblings():
    assert one_group(1, NAN, 0, 1) == [0.5, 0, -1, 0.5]
    assert one_group(1, NAN, NAN) == [0, 0, 0]
    assert one_group(0.7) == [0]


def test_equal_rewards_give_exactly_zero():
    assert one_group(*[0.1] * 7) == [0.0] * 7
    assert one_group(*[0.1] * 7, NAN) == [0.0] * 8


def test_equals_exact_fractions_on_ragged_interleaved_groups():
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(2, 9) for _ in range(rng.randint(1, 5))]
        members = [
            (g, Fraction(rng.randint(-50, 50), 7)) for g, n in enumerate(sizes) for _ in range(n)
        ]
        rng.shuffle(members)
        expected = []
        for number, (group, reward) in enumerate(members):
            others = [r for i, (g, r) in enumerate(members) if g == group and i != number]
            expected.append(float(reward - sum(others) / len(others)))
        result = subtract_baseline(
            tensor(*[float(r) for _, r in members]), torch.tensor([g for g, _ in members])
        )
        assert torch.allclose(result, tensor(*expected), rtol=0, atol=1e-12)


def test_one_outlier_among_equal_rewards_stays_bounded_under_every_normalisation():
    rewards, groups = tensor(0, *[0.95] * 7), torch.zeros(8).long()
    for std_level in ("none", "group", "batch"):
        for normalize in (False, True):
            result = advantages_of(rewards, groups, std_level=std_level, normalize=normalize)
            assert result.isfinite().all()
            assert result.abs().max() <= 8


def test_levels_by_hand():
    rewards, groups = tensor(1, 3, 10, 20), torch.tensor([0, 0, 1, 1])
    plain = advantages_of(rewards, groups, mean_leave1out=False)
    assert plain.tolist() == [-1, 1, -5, 5]
    batch = advantages_of(rewards, groups, mean_level="batch", mean_leave1out=False)
    assert batch.tolist() == [-7.5, -5.5, 1.5, 11.5]
    others = advantages_of(rewards, groups, mean_level="batch")
    assert others.tolist() == [1 - 11, pytest.approx(3 - 31 / 3), 2, pytest.approx(20 - 14 / 3)]
    none = advantages_of(rewards, groups, mean_level="none")
    assert none.tolist() == [1, 3, 10, 20]
    scaled = advantages_of(rewards, groups, std_level="group", epsilon=0.0)
    assert scaled.tolist() == pytest.approx([-(2**0.5), 2**0.5, -(2**0.5), 2**0.5])


def test_normalised_advantages_have_mean_0_and_deviation_1():
    rewards, groups = tensor(1, 3, 10, 20, NAN), torch.tensor([0, 0, 1, 1, 1])
    result = advantages_of(rewards, groups, normalize=True, epsilon=0.0)
    assert result[4] == 0
    assert result[:4].mean().item() == pytest.approx(0, abs=1e-12)
    assert result[:4].std().item() == pytest.approx(1, abs=1e-12)


def test_the_deviation_of_the_others():
    rewards, group = tensor(1, 2, 4, 7), torch.zeros(4).long()
    result = inverse_std(rewards, group, std_level="group", std_leave1out=True, epsilon=0.0)
    others = [[2, 4, 7], [1, 4, 7], [1, 2, 7], [1, 2, 4]]
    assert result.tolist() == pytest.approx([1 / statistics.stdev(o) for o in others])
    # All others equal: nothing to scale by, whatever the reward itself is.
    one_off = inverse_std(
        tensor(0, 1, 1, 1), group, std_level="group", std_leave1out=True, epsilon=1e-6
    )
    assert one_off[0] == 1.0
    assert one_off[1].item() == pytest.approx(1 / (statistics.stdev([0, 1, 1]) + 1e-6))
    pair = inverse_std(tensor(0, 1), torch.zeros(2).long(), std_level="group", std_leave1out=True)
    assert pair.tolist() == [1, 1]


def test_epsilon_beside_the_deviation_or_in_the_variance():
    values = tensor(1, 3)
    assert whiten(values, epsilon=0.5).tolist() == pytest.approx(
        [-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)]
    )
    inside = whiten(values, epsilon=0.5, epsilon_in_variance=True)
    assert inside.tolist() == pytest.approx([-1 / 2.5**0.5, 1 / 2.5**0.5])


def test_without_a_group_statistic_a_single_completion_counts():
    rewards, groups = tensor(1, 3, NAN), torch.tensor([0, 1, 2])
    assert advantages_of(rewards, groups, mean_level="none").tolist() == [1, 3, 0]
    assert advantages_of(rewards, groups, mean_level="batch").tolist() == [-2, 2, 0]
    assert advantages_of(rewards, groups).tolist() == [0, 0, 0]
