import math
import random
from fractions import Fraction

import pytest
import torch

from rloo import objective

NAN = math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_group(*rewards: float) -> list[float]:
    return objective.leave_one_out(tensor(*rewards), torch.zeros(len(rewards)).long()).tolist()


def test_leave_one_out_by_hand():
    assert one_group(1, 2, 3) == [-1.5, 0, 1.5]
    assert one_group(1, 0) == [1, -1]
    assert one_group(1, 1, 1, 0, 0, 0, 0, 0)[0] == pytest.approx(5 / 7)
    assert one_group(1, 1, 1, 0, 0, 0, 0, 0)[3] == pytest.approx(-3 / 7)


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
        result = objective.leave_one_out(
            tensor(*[float(r) for _, r in members]), torch.tensor([g for g, _ in members])
        )
        assert torch.allclose(result, tensor(*expected), rtol=0, atol=1e-12)


def test_one_outlier_among_equal_rewards_stays_bounded_under_every_normalisation():
    rewards, groups = tensor(0, *[0.95] * 7), torch.zeros(8).long()
    for std_level in ("none", "group", "batch"):
        for normalize in (False, True):
            result = objective.advantages(rewards, groups, std_level=std_level, normalize=normalize)
            assert result.isfinite().all()
            assert result.abs().max() <= 8


def test_levels_by_hand():
    rewards, groups = tensor(1, 3, 10, 20), torch.tensor([0, 0, 1, 1])
    plain = objective.advantages(rewards, groups, mean_leave1out=False)
    assert plain.tolist() == [-1, 1, -5, 5]
    batch = objective.advantages(rewards, groups, mean_level="batch", mean_leave1out=False)
    assert batch.tolist() == [-7.5, -5.5, 1.5, 11.5]
    others = objective.advantages(rewards, groups, mean_level="batch")
    assert others.tolist() == [1 - 11, pytest.approx(3 - 31 / 3), 2, pytest.approx(20 - 14 / 3)]
    none = objective.advantages(rewards, groups, mean_level="none")
    assert none.tolist() == [1, 3, 10, 20]
    scaled = objective.advantages(rewards, groups, std_level="group", epsilon=0.0)
    assert scaled.tolist() == pytest.approx([-(2**0.5), 2**0.5, -(2**0.5), 2**0.5])


def test_normalised_advantages_have_mean_0_and_deviation_1():
    rewards, groups = tensor(1, 3, 10, 20, NAN), torch.tensor([0, 0, 1, 1, 1])
    result = objective.advantages(rewards, groups, normalize=True, epsilon=0.0)
    assert result[4] == 0
    assert result[:4].mean().item() == pytest.approx(0, abs=1e-12)
    assert result[:4].std().item() == pytest.approx(1, abs=1e-12)


def test_countable_are_scored_members_of_groups_with_two_scores():
    rewards, groups = tensor(1, NAN, 2, 3, NAN, NAN, 1), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    assert objective.countable(rewards, groups).tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_reward_clip_leaves_missing_ones_missing():
    assert objective.clip_rewards(tensor(-5, 0.5, 9), (-1, 1)).tolist() == [-1, 0.5, 1]
    assert objective.clip_rewards(tensor(NAN), (-1, 1)).isnan().all()
    assert objective.clip_rewards(tensor(-5), None).tolist() == [-5]


def test_kl_is_the_detached_sum_of_log_ratios():
    policy = tensor(-1, -2, -3).requires_grad_()
    kl = objective.sequence_kl(policy, tensor(-1.5, -2, -1), torch.tensor([0, 0, 1]), 2)
    assert kl.tolist() == [0.5, -2]
    assert not kl.requires_grad


# Two completions, of 2 tokens and 1; ratios e^0.1 e^0.2 and e^-0.5.
NOW, OLD = (-1.0, -0.8, -2.0), (-1.1, -1.0, -1.5)
SEQUENCE = torch.tensor([0, 0, 1])


def loss_of(advantages, **options):
    return objective.policy_loss(
        tensor(*NOW), tensor(*OLD), tensor(*advantages), SEQUENCE, denominator=2.0, **options
    )


def test_sequence_ratio_is_a_product_and_clipped_once():
    unclipped = loss_of((1, 1), epsilon_low=9, epsilon_high=9)
    assert unclipped.loss.item() == pytest.approx(-(math.exp(0.3) + math.exp(-0.5)) / 2)
    clipped = loss_of((1, -1), epsilon_low=0.2, epsilon_high=0.2)
    # exp(0.3) > 1.2 with a positive advantage, exp(-0.5) < 0.8 with a negative one: both clipped.
    assert clipped.loss.item() == pytest.approx(-(1.2 - 0.8) / 2)
    assert clipped.clipped_high.tolist() == [True, False]
    assert clipped.clipped_low.tolist() == [False, True]
    pessimistic = loss_of((-1, 1))
    assert pessimistic.loss.item() == pytest.approx(-(-math.exp(0.3) + math.exp(-0.5)) / 2)


def test_token_ratio_aggregations_by_hand():
    a, b, c = math.exp(0.1), 1.2, math.exp(-0.5)  # exp(0.2) is clipped to 1.2
    options = {"ratio_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2}
    assert loss_of((1, 1), **options).loss.item() == pytest.approx(-(a + b + c) / 2)
    mean = loss_of((1, 1), aggregation="sequence_token_mean", **options)
    assert mean.loss.item() == pytest.approx(-((a + b) / 2 + c) / 2)


def test_asymmetric_clipping():
    wide = loss_of((1, 1), epsilon_low=0.2, epsilon_high=0.5)
    assert wide.loss.item() == pytest.approx(-(math.exp(0.3) + math.exp(-0.5)) / 2)


def test_on_policy_gradient_is_that_of_reinforce():
    now = tensor(*NOW).requires_grad_()
    result = objective.policy_loss(now, now.detach(), tensor(2, -3), SEQUENCE, denominator=2.0)
    result.loss.backward()
    assert now.grad.tolist() == [-1, -1, 1.5]


def test_an_enormous_ratio_is_finite_even_where_the_advantage_is_zero():
    now = tensor(0, 0, 0).requires_grad_()
    old = tensor(-1e4, 0, 1e4)
    result = objective.policy_loss(now, old, tensor(0, -1), SEQUENCE, denominator=2.0)
    result.loss.backward()
    assert result.loss.isfinite()
    assert now.grad.isfinite().all()


def test_denominators():
    numbers = {"num_sequences": 6, "num_tokens": 100}
    assert objective.loss_denominator("sequence", constant=None, **numbers) == 6
    assert objective.loss_denominator("sequence_token_mean", constant=None, **numbers) == 6
    assert objective.loss_denominator("token_mean", constant=None, **numbers) == 100
    assert objective.loss_denominator("constant", constant=50, **numbers) == 300
    with pytest.raises(ValueError, match="loss_constant"):
        objective.loss_denominator("constant", constant=None, **numbers)
