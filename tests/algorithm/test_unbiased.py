"""The theorem: averaged over every possible group, the production loss has the exact gradient.

The policy is a table over seven sequences of varying length (tokens 0 = end, 1, 2; at most two).
All groups of K are enumerated with their probabilities.
"""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rloo.algorithm.estimator_registry import load_estimator
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import ARGUMENTS
from rloo.config.presets import BASE
from rloo.tools.exact_gradient import TabularPolicy, logits_table, measure
from support.bandits import BanditGroup, rollout_loss
from support.presets import PRESET_FORMS

REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.0, -0.5, 2.0, 0.7], dtype=torch.float64)
BANDIT = TabularPolicy(logits_table(0, 3), logits_table(1, 3), REWARDS)
SEQUENCES = BANDIT.sequences


def token_logprobs(theta: Tensor) -> list[Tensor]:
    """Log-probs of each sequence's tokens."""
    return list(BANDIT.token_logprobs(theta).split(BANDIT.length_S.tolist()))


REFERENCE = token_logprobs(BANDIT.reference)


def group_loss(lps: list[Tensor], group: tuple[int, ...], scored: tuple[bool, ...], config):
    """The production path for one group."""
    members = [s for s, ok in zip(group, scored, strict=True) if ok]
    return rollout_loss([BanditGroup(lps, REFERENCE, REWARDS, members)], config)


def form(**options) -> RLOOConfig:
    """Options of the objective; beta 0.3 unless said otherwise. The options that are none are
    arguments of the estimator."""
    arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
    if arguments:
        options["estimator_kwargs"] = arguments
    return RLOOConfig(
        **{
            "beta": 0.3,
            "num_generations": 3,
            "num_prompts": 1,
            "max_completion_length": 2,
            **options,
        }
    )


def any_kl(estimator: str, place: str) -> RLOOConfig:
    """The paper's objective, but for a KL that is refused without a preset of which it is known."""
    paper = {**BASE, **ARGUMENTS, "estimator_kwargs": None, "beta": 0.3}
    return form(**{**paper, "preset": "areal", "kl_placement": place, "kl_estimator": estimator})


def groups_of(size: int, ordered: bool) -> Counter[tuple[int, ...]]:
    """All groups; or, since their order changes nothing, one for all orders and how many these
    are."""
    every = itertools.product(range(len(SEQUENCES)), repeat=size)
    return Counter(every if ordered else (tuple(sorted(group)) for group in every))


def expected_gradient(
    size: int, config: RLOOConfig, failure=None, ordered=False, *, given_two=True
) -> Tensor:
    """Minus the mean gradient of the loss over all groups, and over all patterns of failed rewards,
    given that at least two succeed, or with the gradient 0 of the others. `failure` maps a
    sequence's number to its chance of failing."""
    theta = BANDIT.logits.clone().requires_grad_()
    lps = token_logprobs(theta)
    logps = torch.stack([lp.sum() for lp in lps]).detach()
    total, mass = torch.zeros((), dtype=torch.float64), 0.0
    patterns = (
        [(True,) * size] if failure is None else itertools.product([True, False], repeat=size)
    )
    patterns = [p for p in patterns if sum(p) >= 2 or size == 1]
    for group, orders in groups_of(size, ordered).items():
        weight = orders * logps[list(group)].sum().exp().item()
        for scored in patterns:
            chance = weight
            for s, ok in zip(group, scored, strict=True):
                fails = 0.0 if failure is None else failure(s)
                chance *= 1 - fails if ok else fails
            total = total + chance * group_loss(lps, group, scored, config)
            mass += chance
    return -torch.autograd.grad(total, theta)[0] / (mass if given_two else 1.0)


def error_of(gradient: Tensor, beta: float = 0.3) -> float:
    return (gradient - BANDIT.exact_gradient(beta)).abs().max().item()


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("size", [2, 3])
def test_expected_gradient_is_that_of_reward_minus_beta_kl(size, beta):
    for ordered in (True, False):
        assert error_of(expected_gradient(size, form(beta=beta), ordered=ordered), beta) < 1e-12


TOKEN = {"importance_sampling_level": "token"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "estimator.py"
UNBIASED = {
    "leave-one-out by its name": {"estimator": "rloo"},
    "the example, weighed by length": {"estimator": f"{EXAMPLE}:length_weighted"},
    "token ratios": TOKEN,
    "geometric mean ratios": {"importance_sampling_level": "sequence_mean"},
    "no baseline": {"mean_level": "none"},
    "KL after the baseline": {"kl_in_baseline": False},
    "KL to go": {**TOKEN, "kl_placement": "reward_to_go"},
    "KL to go, after the baseline": {
        **TOKEN,
        "kl_placement": "reward_to_go",
        "kl_in_baseline": False,
    },
}


@pytest.mark.parametrize("name", UNBIASED)
def test_other_unbiased_forms(name):
    for size in (2, 3):
        assert error_of(expected_gradient(size, form(**UNBIASED[name]))) < 1e-12


def test_one_completion_per_prompt_without_a_group_baseline_is_unbiased():
    config = form(num_generations=1, mean_level="none")
    assert error_of(expected_gradient(1, config)) < 1e-12


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rewards_missing_independently_of_the_completion_leave_it_unbiased(beta):
    gradient = expected_gradient(3, form(beta=beta), failure=lambda s: 0.25)
    assert error_of(gradient, beta) < 1e-12


@pytest.mark.parametrize(("size", "scale"), [(2, 0.5625), (3, 0.84375)])
def test_missing_rewards_leave_the_direction_and_not_the_scale(size, scale):
    """With one prompt, the scale is the chance of two scores: of K = 2, both; of 3, 2 or 3."""
    config = form(beta=0.0)
    gradient = expected_gradient(size, config, failure=lambda s: 0.25, given_two=False)
    assert (gradient - scale * BANDIT.exact_gradient(0.0)).abs().max().item() < 1e-12


def test_rewards_missing_because_of_the_completion_bias_it():
    """A grader that fails on half of the answers of two tokens (docs/algorithm.md)."""
    gradient = expected_gradient(
        3, form(beta=0.0), failure=lambda s: 0.5 * (len(SEQUENCES[s]) == 2)
    )
    exact = BANDIT.exact_gradient(0.0)
    assert error_of(gradient, 0.0) == pytest.approx(0.0453, abs=1e-4)
    measured = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0)
    assert measured.item() == pytest.approx(0.9635, abs=1e-4)


def test_k2_in_the_loss_has_the_gradient_of_k1_and_k3_with_bias_correction():
    plain = expected_gradient(2, form(kl_placement="loss", kl_estimator="k2"))
    for estimator in ("k1", "k3"):
        config = form(kl_placement="loss", kl_estimator=estimator, use_bias_correction_kl=True)
        assert (expected_gradient(2, config) - plain).abs().max().item() < 1e-12


def test_k1_in_the_loss_has_no_expected_gradient_at_all():
    gradient = expected_gradient(2, any_kl("k1", "loss"))
    assert (gradient - BANDIT.exact_gradient(0.0)).abs().max().item() < 1e-12


# variant: (options, scale along the exact gradient, cosine with it), for K = 3, beta = 0.3
BIASED = {
    "group mean, itself included": ({"mean_leave1out": False}, 0.6667, 1.0),
    "mean over each answer's tokens": ({"loss_aggregation": "sequence_token_mean"}, 0.5661, 0.9704),
    "mean over all tokens": ({"loss_aggregation": "token_mean"}, 0.5540, 0.9984),
    "divided by the group's deviation": ({"std_level": "group"}, 1.7861, 0.9713),
    "standardised over the batch": ({"normalize_advantages": True}, 1.1907, 0.9712),
    "leaving out one token": ({**TOKEN, "mean_over": "tokens"}, 0.8097, 0.9969),
    "GRPO's advantages by name": ({"estimator": "grpo"}, 1.1907, 0.9713),
    "REINFORCE++'s advantages by name": ({**TOKEN, "estimator": "reinforce_pp"}, 1.4475, 0.9285),
    "the example of OPO": ({"estimator": f"{EXAMPLE}:opo"}, 0.6596, 0.9981),
    "k2 in the loss": ({"kl_placement": "loss", "kl_estimator": "k2"}, 0.9505, 0.9744),
    "k3 in the loss": ({"kl_placement": "loss", "kl_estimator": "k3"}, 0.8890, 0.9100),
    "k2 in the reward": (any_kl("k2", "reward"), 0.9156, 0.9149),
    "k3 in the reward": (any_kl("k3", "reward"), 0.9224, 0.8840),
}


@pytest.mark.parametrize("name", BIASED | PRESET_FORMS)
def test_biased_variants_are_caught_and_their_bias_is_as_stated(name):
    options, scale, cosine = (BIASED | PRESET_FORMS)[name]
    config = options if isinstance(options, RLOOConfig) else form(**options)
    gradient, exact = expected_gradient(3, config), BANDIT.exact_gradient(0.3)
    along = ((gradient * exact).sum() / (exact * exact).sum()).item()
    measured = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0).item()
    assert (along, measured) == pytest.approx((scale, cosine), abs=1e-4)
    assert error_of(gradient) > 1e-3


@pytest.mark.parametrize("name", ["paper", "trl"])
def test_the_presets_of_the_paper_and_of_trl_are_unbiased(name):
    assert error_of(expected_gradient(3, form(preset=name))) < 1e-12


def test_group_mean_scales_the_gradient_by_exactly_k_minus_1_over_k():
    for size in (2, 3):
        gradient = expected_gradient(size, form(mean_leave1out=False))
        expected = BANDIT.exact_gradient(0.3) * (size - 1) / size
        assert (gradient - expected).abs().max().item() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_what_is_measured_of_an_estimator_is_what_the_production_loss_does(beta):
    """`rloo check-estimator` weighs scores with advantages; training differentiates a loss."""
    exact = BANDIT.exact_gradient(beta)
    forms = (
        {},
        {"std_level": "group"},
        {"estimator": "grpo"},
        {"estimator": f"{EXAMPLE}:opo"},
        {**TOKEN, "kl_placement": "reward_to_go", "estimator_kwargs": {"kl_in_baseline": False}},
    )
    for options in forms:
        config = form(**options, beta=beta)
        gradient = expected_gradient(3, config)
        (found,) = measure(load_estimator(config), [BANDIT], 3, beta)
        along = ((gradient * exact).sum() / (exact * exact).sum()).item()
        cosine = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0).item()
        error = ((gradient - exact).norm() / exact.norm()).item()
        expected = pytest.approx((along, cosine, error), abs=1e-12)
        assert (found.scale, found.cosine, found.error) == expected
