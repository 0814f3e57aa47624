import itertools
import math

import pytest
import torch

from rloo.algorithm.kl_estimate import kl_estimate
from rloo.algorithm.loss import (
    PolicyLossConfig,
    importance_weights,
    loss_denominator,
    policy_loss,
    ratio_of,
)
from rloo.algorithm.ragged import Completions, reward_to_go


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Two completions, of 2 tokens and 1; ratios e^0.1 e^0.2 and e^-0.5.
NOW, OLD = (-1.0, -0.8, -2.0), (-1.1, -1.0, -1.5)
COMPLETIONS = Completions(torch.tensor([0, 0, 1]), 2)


def loss_of(advantages, **options):
    weights = options.pop("weights_T", None)
    form = PolicyLossConfig(**options)
    result = policy_loss(
        tensor(*NOW), tensor(*OLD), tensor(*advantages), COMPLETIONS, form, weights
    )
    return result._replace(loss=result.loss / 2)


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
    assert loss_of((1, 1, 1), **options).loss.item() == pytest.approx(-(a + b + c) / 2)
    mean = loss_of((1, 1, 1), aggregation="sequence_token_mean", **options)
    assert mean.loss.item() == pytest.approx(-((a + b) / 2 + c) / 2)


def test_asymmetric_clipping():
    wide = loss_of((1, 1), epsilon_low=0.2, epsilon_high=0.5)
    assert wide.loss.item() == pytest.approx(-(math.exp(0.3) + math.exp(-0.5)) / 2)


def test_on_policy_gradient_is_that_of_reinforce():
    now = tensor(*NOW).requires_grad_()
    result = policy_loss(now, now.detach(), tensor(2, -3), COMPLETIONS)
    (result.loss / 2).backward()
    assert now.grad.tolist() == [-1, -1, 1.5]


def test_an_enormous_ratio_is_finite_even_where_the_advantage_is_zero():
    now = tensor(0, 0, 0).requires_grad_()
    old = tensor(-1e4, 0, 1e4)
    result = policy_loss(now, old, tensor(0, -1), COMPLETIONS)
    result.loss.backward()
    assert result.loss.isfinite()
    assert now.grad.isfinite().all()


def test_nothing_overflows_at_any_level_aggregation_or_weight():
    """Log-ratios of 10,000 either way, in float32, with advantages of 0 among them."""
    far = torch.tensor([1e4, -1e4, 0.0, 1e4, -1e4])
    completions = Completions(torch.tensor([0, 1, 2, 3, 3]), 4)
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", None)
    levels, aggregations = (
        ("sequence", "sequence_mean", "token"),
        ("sequence_token_mean", "sequence"),
    )
    for level, aggregation, mode in itertools.product(levels, aggregations, modes):
        now = far.clone().requires_grad_()
        advantages = torch.tensor([0.0, -1.0, 1.0, 0.0, -2.0])[: 5 if level == "token" else 4]
        weights = mode and importance_weights(-far - far, completions, mode=mode, upper=1e30)
        result = policy_loss(
            now,
            torch.zeros(5),
            advantages,
            completions,
            PolicyLossConfig(ratio_level=level, aggregation=aggregation),
            weights,
        )
        loss = result.loss
        for estimator in ("k1", "k2", "k3"):
            kl = kl_estimate(now, torch.zeros(5), estimator=estimator)
            loss = loss + (kl * ratio_of(now)).sum()
        loss.backward()
        assert loss.isfinite() and now.grad.isfinite().all(), (level, aggregation, mode)


def test_a_kl_in_the_loss_never_pulls_away_from_the_reference():
    for distance in (-1e4, -25.0, -1.0, 1.0, 25.0, 1e4):
        for estimator in ("k2", "k3"):
            policy = tensor(distance).requires_grad_()
            kl_estimate(policy, tensor(0.0), estimator=estimator).sum().backward()
            assert policy.grad.item() * distance >= 0


def test_denominators():
    numbers = {"num_sequences": 6, "num_tokens": 100}
    assert loss_denominator("sequence", constant=None, **numbers) == 6
    assert loss_denominator("sequence_token_mean", constant=None, **numbers) == 6
    assert loss_denominator("token_mean", constant=None, **numbers) == 100
    assert loss_denominator("constant", constant=50, **numbers) == 300
    with pytest.raises(ValueError, match="loss_constant"):
        loss_denominator("constant", constant=None, **numbers)


def test_the_geometric_mean_of_the_ratios_is_that_of_each_token():
    # exp((0.1 + 0.2) / 2) = 1.1618 and exp(-0.5), clipped to 0.8 where the advantage is negative.
    first, second = math.exp(0.15), -0.8
    for aggregation, expected in (
        ("sequence", 2 * first + second),
        ("token_mean", 2 * first + second),
        ("sequence_token_mean", first + second),
    ):
        result = loss_of((1, -1), ratio_level="sequence_mean", aggregation=aggregation)
        assert result.loss.item() == pytest.approx(-expected / 2)
        assert result.clipped_low.tolist() == [False, True]


@pytest.mark.parametrize("aggregation", ["sequence", "sequence_token_mean", "token_mean"])
def test_on_policy_every_level_of_the_ratio_has_the_same_gradient(aggregation):
    found = []
    for level in ("sequence", "sequence_mean", "token"):
        now = tensor(*NOW).requires_grad_()
        values = tensor(2, 2, -3) if level == "token" else tensor(2, -3)
        policy_loss(
            now,
            now.detach(),
            values,
            COMPLETIONS,
            PolicyLossConfig(ratio_level=level, aggregation=aggregation),
        ).loss.backward()
        found.append(now.grad)
    assert torch.allclose(found[0], found[1]) and torch.allclose(found[0], found[2])


def test_dual_clipping_bounds_the_ratio_where_the_advantage_is_negative():
    now, old = tensor(2.0, 2.0), tensor(0.0, 0.0)
    sequences = torch.tensor([0, 1])
    result = policy_loss(
        now,
        old,
        tensor(-1, 1),
        Completions(sequences, 2),
        PolicyLossConfig(delta=3.0),
    )
    assert result.loss.item() == pytest.approx(3.0 - 1.2)


def test_weights_multiply_the_terms_of_tokens_and_of_completions():
    weights = tensor(0.5, 2.0, 0.0)
    token = loss_of((1, 1, 1), ratio_level="token", weights_T=weights)
    assert token.loss.item() == pytest.approx(-(0.5 * math.exp(0.1) + 2 * 1.2) / 2)
    whole = loss_of((1, 1), weights_T=tensor(3.0, 3.0, 0.5), epsilon_low=9, epsilon_high=9)
    assert whole.loss.item() == pytest.approx(-(3 * math.exp(0.3) + 0.5 * math.exp(-0.5)) / 2)


def test_importance_weights_are_truncated_or_masked():
    policy, behavior = tensor(0.0, 1.0, -1.0), tensor(0.0, 0.0, 0.0)
    ratios = [1.0, math.e, math.exp(-1)]

    def weigh(mode, **bounds):
        return importance_weights(policy - behavior, COMPLETIONS, mode=mode, **bounds).tolist()

    assert weigh("token_truncate", upper=2.0) == pytest.approx([1, 2, ratios[2]])
    assert weigh("token_mask", upper=2.0) == pytest.approx([1, 0, ratios[2]])
    assert weigh("token_mask", upper=5.0, lower=0.5) == pytest.approx([1, math.e, 0])
    assert weigh("sequence_truncate", upper=2.0) == pytest.approx([2, 2, ratios[2]])
    assert weigh("sequence_mask", upper=2.0) == pytest.approx([0, 0, ratios[2]])


def test_kl_estimates_by_hand():
    policy, reference = tensor(-1.0, -1.0), tensor(-1.5, 0.0)

    def estimate(name, **options):
        return kl_estimate(policy, reference, estimator=name, **options).tolist()

    assert estimate("k1") == [0.5, -1]
    assert estimate("k2") == [0.125, 0.5]
    assert estimate("k3") == pytest.approx([math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1])
    assert estimate("k1", clip=0.3) == [0.3, -0.3]
    assert kl_estimate(tensor(-1e5), tensor(0.0), estimator="k3").isfinite().all()
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        estimate("k4")


def test_the_return_to_go_is_the_sum_from_each_token_on():
    values = tensor(1, 2, 3, 4, 5, 6)
    result = reward_to_go(values, torch.tensor([0, 0, 0, 1, 2, 2]), 3)
    assert result.tolist() == [6, 5, 3, 4, 11, 6]
