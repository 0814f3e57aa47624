"""The theorem: averaged over every possible group, the production loss has the exact gradient.

A policy over seven sequences of varying length (tokens 0 = end, 1, 2; at most two tokens) is a
table of 4 x 3 numbers. All groups of K are enumerated with their probabilities.
"""

import itertools

import pytest
import torch
from torch import Tensor

from rloo import objective

SEQUENCES = [(0,), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2)]
REWARDS = torch.tensor([0.1, 1.0, -0.5, 0.3, 0.0, 2.0, 0.7], dtype=torch.float64)


def table(number: int) -> Tensor:
    return torch.sin(torch.arange(12, dtype=torch.float64) * (1.3 + number)).view(4, 3)


def token_logprobs(theta: Tensor) -> list[Tensor]:
    """Log-probs of each sequence's tokens: row 0 of the table first, row 1 + a after token a."""
    rows = theta.log_softmax(-1)
    return [
        torch.stack([rows[0 if t == 0 else 1 + s[t - 1], s[t]] for t in range(len(s))])
        for s in SEQUENCES
    ]


REFERENCE = [lp.detach() for lp in token_logprobs(table(1))]


def exact_gradient(beta: float) -> Tensor:
    theta = table(0).requires_grad_()
    logps = torch.stack([lp.sum() for lp in token_logprobs(theta)])
    reference = torch.stack([lp.sum() for lp in REFERENCE])
    value = (logps.exp() * (REWARDS - beta * (logps - reference))).sum()
    return torch.autograd.grad(value, theta)[0]


def group_loss(lps: list[Tensor], group: tuple[int, ...], scored: tuple[bool, ...], beta, options):
    """The production path for one group: KL into the reward, advantages, loss."""
    members = [s for s, ok in zip(group, scored, strict=True) if ok]
    size = len(members)
    sequence_T = torch.arange(size).repeat_interleave(torch.tensor([len(lps[s]) for s in members]))
    logprobs = torch.cat([lps[s] for s in members])
    reference = torch.cat([REFERENCE[s] for s in members])
    kl = objective.sequence_kl(logprobs, reference, sequence_T, size)
    group_N = torch.zeros(size, dtype=torch.long)
    advantages = objective.advantages(
        REWARDS[members] - beta * kl, group_N, **options.get("advantages", {})
    )
    loss_options = options.get("loss", {})
    denominator = objective.loss_denominator(
        loss_options.get("aggregation", "sequence"),
        num_sequences=size,
        num_tokens=len(logprobs),
        constant=2.0,
    )
    return objective.policy_loss(
        logprobs, logprobs.detach(), advantages, sequence_T, denominator=denominator, **loss_options
    ).loss


def expected_gradient(size: int, beta: float, options=None, failure=None) -> Tensor:
    """Minus the mean gradient of the loss over all groups, and over all patterns of failed rewards,
    given that at least two succeed. `failure` maps a sequence's number to its chance of failing."""
    theta = table(0).requires_grad_()
    lps = token_logprobs(theta)
    logps = torch.stack([lp.sum() for lp in lps]).detach()
    total, mass = torch.zeros((), dtype=torch.float64), 0.0
    patterns = (
        [(True,) * size] if failure is None else itertools.product([True, False], repeat=size)
    )
    patterns = [p for p in patterns if sum(p) >= 2]
    for group in itertools.product(range(len(SEQUENCES)), repeat=size):
        weight = logps[list(group)].sum().exp().item()
        for scored in patterns:
            chance = weight
            for s, ok in zip(group, scored, strict=True):
                fails = 0.0 if failure is None else failure(s)
                chance *= 1 - fails if ok else fails
            total = total + chance * group_loss(lps, group, scored, beta, options or {})
            mass += chance
    return -torch.autograd.grad(total, theta)[0] / mass


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("size", [2, 3])
def test_expected_gradient_is_that_of_reward_minus_beta_kl(size, beta):
    error = (expected_gradient(size, beta) - exact_gradient(beta)).abs().max().item()
    assert error < 1e-12


def test_token_level_ratio_has_the_same_gradient_while_the_ratio_is_1():
    options = {"loss": {"ratio_level": "token"}}
    error = (expected_gradient(2, 0.3, options) - exact_gradient(0.3)).abs().max().item()
    assert error < 1e-12


def test_no_baseline_at_all_is_unbiased_too():
    options = {"advantages": {"mean_level": "none"}}
    error = (expected_gradient(2, 0.3, options) - exact_gradient(0.3)).abs().max().item()
    assert error < 1e-12


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rewards_missing_independently_of_the_completion_leave_it_unbiased(beta):
    gradient = expected_gradient(3, beta, failure=lambda s: 0.25)
    assert (gradient - exact_gradient(beta)).abs().max().item() < 1e-12


def test_rewards_missing_because_of_the_completion_bias_it():
    """A grader that fails on half of the answers of two tokens (docs/algorithm.md)."""
    gradient = expected_gradient(3, 0.0, failure=lambda s: 0.5 * (len(SEQUENCES[s]) == 2))
    exact = exact_gradient(0.0)
    assert (gradient - exact).abs().max().item() == pytest.approx(0.0453, abs=1e-4)
    measured = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0)
    assert measured.item() == pytest.approx(0.9635, abs=1e-4)


# variant: (options, scale along the exact gradient, cosine with it), for K = 3, beta = 0.3
BIASED = {
    "group mean, itself included": ({"advantages": {"mean_leave1out": False}}, 0.6667, 1.0),
    "mean over each answer's tokens": (
        {"loss": {"aggregation": "sequence_token_mean"}},
        0.5661,
        0.9704,
    ),
    "mean over all tokens": ({"loss": {"aggregation": "token_mean"}}, 0.5540, 0.9984),
    "divided by the group's deviation": ({"advantages": {"std_level": "group"}}, 1.7861, 0.9713),
    "standardised over the batch": ({"advantages": {"normalize": True}}, 1.1907, 0.9712),
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_variants_are_caught_and_their_bias_is_as_stated(name):
    options, scale, cosine = BIASED[name]
    gradient, exact = expected_gradient(3, 0.3, options), exact_gradient(0.3)
    assert (gradient - exact).abs().max().item() > 1e-2
    along = (gradient * exact).sum() / (exact * exact).sum()
    assert along.item() == pytest.approx(scale, abs=1e-4)
    measured = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0)
    assert measured.item() == pytest.approx(cosine, abs=1e-4)


def test_group_mean_scales_the_gradient_by_exactly_k_minus_1_over_k():
    options = {"advantages": {"mean_leave1out": False}}
    for size in (2, 3):
        gradient = expected_gradient(size, 0.3, options)
        expected = exact_gradient(0.3) * (size - 1) / size
        assert (gradient - expected).abs().max().item() < 1e-12
