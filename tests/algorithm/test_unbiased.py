"""The theorem: averaged over every possible group, the production loss has the exact gradient.

The policy is a table over seven sequences of varying length (tokens 0 = end, 1, 2; at most two).
All groups of K are enumerated with their probabilities.
"""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from rloo.algorithm.estimator_registry import load_estimator
from rloo.config.config import RLOOConfig
from rloo.config.estimator_config import ARGUMENTS
from rloo.config.presets import BASE, PRESETS, Bias, remarks
from rloo.tools.exact_gradient import TabularPolicy, logits_table, measure
from support.bandits import BanditGroup, TokenTables, rollout_loss

REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.0, -0.5, 2.0, 0.7], dtype=torch.float64)
BANDIT = TabularPolicy(logits_table(0, 3), logits_table(1, 3), REWARDS)
SEQUENCES = BANDIT.sequences


def token_logprobs(theta: Tensor) -> list[Tensor]:
    """Log-probs of each sequence's tokens."""
    return list(BANDIT.token_logprobs(theta).split(BANDIT.length_S.tolist()))


REFERENCE = token_logprobs(BANDIT.reference)
# Sums of squared probabilities, of the first token and of that after each token.
SQUARES = BANDIT.logits.softmax(-1).square().sum(-1)
COLLISION = [SQUARES[[0, *(1 + token for token in ids[:-1])]] for ids in SEQUENCES]


def state_kls(theta: Tensor) -> list[Tensor]:
    """KL over the vocabulary at each token of each sequence, by torch."""
    rows = torch.nn.functional.kl_div(
        BANDIT.reference.log_softmax(-1), theta.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    return [rows[[0, *(1 + token for token in sequence[:-1])]] for sequence in SEQUENCES]


class Tables(NamedTuple):
    """Of each sequence's tokens: the policy's log-probs, the KLs, and the sampler's log-probs."""

    logprobs: list[Tensor]
    kls: list[Tensor]
    drawn: list[Tensor]


def group_loss(tables: Tables, group: tuple[int, ...], scored: tuple[bool, ...], config):
    """The production path for one group."""
    members = [s for s, ok in zip(group, scored, strict=True) if ok]
    tokens = TokenTables(REFERENCE, tables.kls, tables.drawn, COLLISION)
    return rollout_loss([BanditGroup(tables.logprobs, tokens, REWARDS, members)], config)


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
    size: int, config: RLOOConfig, failure=None, ordered=False, *, sampler=None, given_two=True
) -> Tensor:
    """Minus the mean gradient of the loss over all groups, and over all patterns of failed rewards,
    given that at least two succeed, or with the gradient 0 of the others. `failure` maps a
    sequence's number to its chance of failing. The logits `sampler` sample, by default those of the
    policy."""
    theta = BANDIT.logits.clone().requires_grad_()
    lps = token_logprobs(theta)
    drawn = lps if sampler is None else token_logprobs(sampler)
    tables = Tables(lps, state_kls(theta), drawn)
    logps = torch.stack([lp.sum() for lp in drawn]).detach()
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
            total = total + chance * group_loss(tables, group, scored, config)
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
    "weighed by length": {"estimator": "length_weighted"},
    "a baseline for each token": {**TOKEN, "estimator": "optimal_token"},
    "a regression, with any coefficients": {"estimator": "regression"},
    "shrinkage, with a single prompt": {"estimator": "shrinkage"},
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


EXACT = {"kl_estimator": "exact"}
CORRECTED = {
    "rollout_importance_sampling_mode": "sequence_truncate",
    "rollout_importance_sampling_threshold": 1e8,
}


@pytest.mark.parametrize("name", ["defaults", *UNBIASED])
def test_an_exact_kl_in_the_reward_is_unbiased_in_every_unbiased_form(name):
    for size in (2, 3) if name == "defaults" else (2,):
        config = form(**UNBIASED.get(name, {}), **EXACT)
        assert error_of(expected_gradient(size, config)) < 1e-12


def test_an_exact_kl_is_unbiased_for_samples_of_another_policy_with_its_weights():
    config = form(**EXACT, **CORRECTED)
    gradient = expected_gradient(2, config, sampler=logits_table(2, 3))
    assert error_of(gradient) < 1e-12


def test_a_clipped_exact_kl_is_the_objective_with_the_clipped_penalty():
    clip, theta = 0.4, BANDIT.logits.clone().requires_grad_()
    kls = state_kls(theta)
    assert 0 < sum(bool((kl > clip).any()) for kl in kls) < len(kls)
    value = sum(
        lp.sum().exp() * (reward - 0.3 * kl.clamp(max=clip).sum())
        for lp, kl, reward in zip(token_logprobs(theta), kls, REWARDS, strict=True)
    )
    exact = torch.autograd.grad(value, theta)[0]
    gradient = expected_gradient(2, form(**EXACT, kl_kwargs={"clip": clip}))
    assert (gradient - exact).abs().max().item() < 1e-12


def test_an_exact_kl_in_the_loss_has_the_expected_gradient_of_k2():
    exact, k2 = (
        expected_gradient(2, form(kl_placement="loss", kl_estimator=estimator))
        for estimator in ("exact", "k2")
    )
    assert (exact - k2).abs().max().item() < 1e-12


def test_one_completion_per_prompt_without_a_group_baseline_is_unbiased():
    config = form(num_generations=1, mean_level="none")
    assert error_of(expected_gradient(1, config)) < 1e-12


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("estimator", ["rloo", "length_weighted", "optimal_token", "regression"])
def test_rewards_missing_independently_of_the_completion_leave_it_unbiased(beta, estimator):
    options = TOKEN if estimator == "optimal_token" else {}
    config = form(beta=beta, estimator=estimator, **options)
    gradient = expected_gradient(3, config, failure=lambda s: 0.25)
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
    "OPO's mean, itself included": (
        {"estimator": "length_weighted", "estimator_kwargs": {"leave1out": False}},
        0.6596,
        0.9981,
    ),
    "a baseline for each token, itself included": (
        {**TOKEN, "estimator": "optimal_token", "estimator_kwargs": {"leave1out": False}},
        0.6111,
        0.9965,
    ),
    "k2 in the loss": ({"kl_placement": "loss", "kl_estimator": "k2"}, 0.9505, 0.9744),
    "exact in the loss": ({"kl_placement": "loss", "kl_estimator": "exact"}, 0.9505, 0.9744),
    "k3 in the loss": ({"kl_placement": "loss", "kl_estimator": "k3"}, 0.8890, 0.9100),
    "k2 in the reward": (any_kl("k2", "reward"), 0.9156, 0.9149),
    "k3 in the reward": (any_kl("k3", "reward"), 0.9224, 0.8840),
}


PRESET_FORMS = {
    name: ({"preset": name}, *preset.bias)
    for name, preset in PRESETS.items()
    if preset.bias != (1, 1)
}


def bias_of(gradient: Tensor, exact: Tensor) -> Bias:
    along = ((gradient * exact).sum() / (exact * exact).sum()).item()
    cosine = torch.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0).item()
    return Bias(along, cosine)


@pytest.mark.parametrize("name", BIASED | PRESET_FORMS)
def test_biased_variants_are_caught_and_their_bias_is_as_stated(name):
    options, scale, cosine = (BIASED | PRESET_FORMS)[name]
    config = options if isinstance(options, RLOOConfig) else form(**options)
    gradient = expected_gradient(3, config)
    found = bias_of(gradient, BANDIT.exact_gradient(0.3))
    assert found == pytest.approx((scale, cosine), abs=1e-4)
    assert error_of(gradient) > 1e-3


@pytest.mark.parametrize("name", ["areal_docs", "opo", "optimal_token_baseline"])
def test_the_notes_of_a_run_state_the_bias_of_a_preset_as_measured(name):
    (note,) = remarks(RLOOConfig(preset=name))
    options = [{"preset": name}]
    if name != "areal_docs":
        options.append({"preset": name, "estimator_kwargs": {"leave1out": True}})
    stated = re.findall(r"scale ([\d.]+), cosine ([\d.]+)", note)
    assert len(stated) == len(options)
    for figures, some in zip(stated, options, strict=True):
        found = bias_of(expected_gradient(3, form(**some)), BANDIT.exact_gradient(0.3))
        assert [float(figure) for figure in figures] == pytest.approx(found, abs=5.1e-5)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in PRESET_FORMS])
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
        EXACT,
        {**EXACT, "estimator": f"{EXAMPLE}:opo"},
        {**EXACT, **TOKEN, "kl_placement": "reward_to_go"},
    )
    for options in forms:
        config = form(**options, beta=beta)
        gradient = expected_gradient(3, config)
        exact_kl = config.kl_estimator == "exact"
        (found,) = measure(load_estimator(config), [BANDIT], 3, beta, exact_kl=exact_kl)
        error = ((gradient - exact).norm() / exact.norm()).item()
        expected = pytest.approx((*bias_of(gradient, exact), error), abs=1e-12)
        assert (found.scale, found.cosine, found.error) == expected
