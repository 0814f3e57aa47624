"""What options cost in bias, by enumeration through shaping, credit and update of a transformer:
the figures of docs/algorithm.md. `test_unbiased.py` enumerates the forms of the loss alone."""

from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.regression import Observation
from rloo.algorithm.reward_shaping import has_reward_variance
from rloo.config.config import RLOOConfig
from rloo.data.group_budget import GroupBudget
from rloo.tools.exact_gradient import all_draws
from rloo.tools.probe_sampling import all_probe_draws, make_probe_sampler
from rloo.trainer.prompt_sampling import candidates_per_prompt
from support.production import Production, compare, make_tiny, with_failures
from support.weighted_rollouts import drawn_rollouts, pilot_rollouts, second_sizes

# A policy that ends 36 % of its completions itself, and one that ends 18 %.
SEED, SELDOM_ENDS = 9, 64
# Rewards of which many are equal: in half of the groups all are.
BINARY = ([1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 1, 0])
MASKED = {"mask_truncated_completions": True}
TOKEN = {"importance_sampling_level": "token"}
LEFT_IN = {"estimator_kwargs": {"leave1out": False}}
EXACT = {"kl_estimator": "exact"}
TO_GO = {**TOKEN, "kl_placement": "reward_to_go"}
TWO_PROMPTS = {"num_prompts": 2, "max_completion_length": 1}
WEIGHTED = {**TWO_PROMPTS, "prompt_sampling": "variance"}
MODE, BOUND = "rollout_importance_sampling_mode", "rollout_importance_sampling_threshold"


def form(beta: float, **options) -> RLOOConfig:
    defaults = {
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "num_generations": 2,
        "num_prompts": 1,
        "max_completion_length": 2,
        "beta": beta,
    }
    return RLOOConfig(**{**defaults, **options})


def earlier_rewards(beta: float) -> KLController:
    past = KLController(beta)
    past.update_reward_stats([0.3, 1.2, -0.5, 0.7], decay=0.95)
    earlier = [(1.0, 0.5, 0.2), (2.0, -0.4, 0.6), (0.5, 0.1, 1.0), (3.0, -1.0, 1.5)]
    groups = [("", [Observation(*values)]) for values in earlier * 4]
    past.regression.add(groups, half_life=8.0)
    assert min(map(abs, past.regression.coefficients(""))) > 0.1
    return past


def of_policy(beta, *, seed=SEED, longest=2, **options):
    return Production(form(beta, **options), seed=seed, longest=longest)


def after_others(beta, **options):
    return Production(form(beta, **options), seed=SEED, past=earlier_rewards(beta))


def of_two_prompts(beta, **options):
    return of_policy(beta, longest=1, **TWO_PROMPTS, **options)


@cache
def sampler():
    """Ratios of whole completions to it are 0.71 to 1.50; KL(it || policy) is 0.036 nats."""
    model = make_tiny(SEED)
    for own, other in zip(model.parameters(), make_tiny(SEED + 1).parameters(), strict=True):
        own.data.lerp_(other.data, 0.25)
    return model


def off_policy(beta, mode=None, bound=1e8, **options):
    corrected = {} if mode is None else {MODE: mode, BOUND: bound}
    return Production(form(beta, **corrected, **options), seed=SEED, sampler=sampler())


def missing(*rates, **options):
    def make(beta):
        case = of_two_prompts(beta, **options)
        return case, with_failures(case.rollouts(), lambda prompt: rates[prompt])

    return make


def weighted(beta):
    """Of two prompts the second is drawn four times as often."""
    case = of_policy(beta, longest=1, **WEIGHTED)
    return case, drawn_rollouts(case, all_draws([0.4, 1.6], 2))


def probed(beta, kind):
    """One of three prompts or of two candidates, drawn by the predictions for another prompt."""
    options = {**WEIGHTED, "num_prompts": 3, "prompt_sampling_kwargs": {"probe": kind}}
    case = of_policy(beta, longest=1, **options)
    floor, each = case.config.prompt_options.floor, candidates_per_prompt(kind)
    sampler = make_probe_sampler("is wrong", 3, floor=floor, each=each)
    return case, drawn_rollouts(case, all_probe_draws(sampler, 1))


def sized(beta):
    """As `weighted`, with 2 to 4 completions by the deviations 1 and 40."""
    options = {"num_generations": 3, "prompt_sampling_kwargs": {"max_generations": 4}}
    case, budget = of_policy(beta, longest=1, **WEIGHTED, **options), GroupBudget(3, 4, 2)

    def sizes_of(draws):
        return budget.sizes(np.array([weight * (1.0, 40.0)[n] for n, weight in draws]))

    rollouts = list(drawn_rollouts(case, all_draws([0.4, 1.6], 2), sizes_of))
    assert {len(group.completions) for _, groups in rollouts for group in groups} == {2, 3, 4}
    return case, rollouts


def piloted(beta):
    """Two completions of each prompt, and one to three that follow from their rewards."""
    kwargs, budget = {"pilot": 2, "max_generations": 5}, GroupBudget(4, 5, 2, pilot=2)
    options = {"num_generations": 4, "prompt_sampling_kwargs": kwargs}
    case = of_policy(beta, longest=1, **WEIGHTED, **options)
    return case, pilot_rollouts(case, 2, lambda rewards: second_sizes(budget, rewards))


def resampled(beta, **options):
    """Each of the groups that are used, of prompts drawn alike, given that it has signal."""
    case = Production(form(beta, num_prompts=2, **options), rewards=BINARY, seed=SEED)
    groups = [(chance, [group]) for prompt in (0, 1) for chance, group in case.groups(prompt)]
    return case, [(chance, g) for chance, g in groups if has_reward_variance(g[0], case.config)]


# The first column of the table: (what is enumerated, {beta: (scale, cosine)}).
COSTS = {
    "defaults": (of_policy, {0.0: (1, 1), 0.3: (1, 1)}),
    "`mean_level batch`": (
        lambda beta: of_two_prompts(beta, mean_level="batch"),
        {0.3: (1, 1)},
    ),
    "`mean_level running`": (lambda beta: after_others(beta, mean_level="running"), {0.3: (1, 1)}),
    "`estimator shrinkage`": (
        lambda beta: of_two_prompts(beta, estimator="shrinkage"),
        {0.0: (1, 1), 0.3: (1, 1)},
    ),
    "`estimator regression`": (
        lambda beta: after_others(beta, estimator="regression"),
        {0.0: (1, 1), 0.3: (1, 1)},
    ),
    "`estimator length_weighted`": (
        lambda beta: of_policy(beta, estimator="length_weighted"),
        {0.0: (1, 1), 0.3: (1, 1)},
    ),
    "`estimator optimal_token` (token ratios)": (
        lambda beta: of_policy(beta, estimator="optimal_token", **TOKEN),
        {0.0: (1, 1), 0.3: (1, 1)},
    ),
    "`estimator length_weighted`, `estimator_kwargs.leave1out false`": (
        lambda beta: of_policy(beta, estimator="length_weighted", **LEFT_IN),
        {0.0: (0.5232, 0.9991), 0.3: (0.4757, 0.9998)},
    ),
    "`estimator optimal_token`, `estimator_kwargs.leave1out false`": (
        lambda beta: of_policy(beta, estimator="optimal_token", **TOKEN, **LEFT_IN),
        {0.0: (0.5085, 0.9974), 0.3: (0.5312, 0.9893)},
    ),
    "`normalize_rewards running`": (
        lambda beta: after_others(beta, normalize_rewards="running"),
        {0.0: (1.3923, 1), 0.3: (1.5691, 0.9683)},
    ),
    "`normalize_rewards batch`": (
        lambda beta: of_two_prompts(beta, normalize_rewards="batch"),
        {0.0: (1.7217, 0.9958), 0.3: (1.5912, 0.9772)},
    ),
    "`mask_truncated_completions`, 64 % truncated": (
        lambda beta: of_policy(beta, **MASKED),
        {0.0: (0.6543, 0.7811), 0.3: (0.1403, 0.1598)},
    ),
    "`mask_truncated_completions`, 82 % truncated": (
        lambda beta: of_policy(beta, seed=SELDOM_ENDS, **MASKED),
        {0.0: (-0.0389, -0.0873), 0.3: (-0.0288, -0.1538)},
    ),
    "the same, 64 % truncated, with `estimator_kwargs.kl_of_truncated false`": (
        lambda beta: of_policy(beta, estimator_kwargs={"kl_of_truncated": False}, **MASKED),
        {0.3: (0.3141, 0.2965)},
    ),
    "rewards missing for 25 % of each prompt's completions": (
        missing(0.25, 0.25),
        {0.0: (0.8086, 1)},
    ),
    "rewards missing for 60 % of one prompt's completions, 5 % of another prompt's": (
        missing(0.6, 0.05),
        {0.0: (1.3717, 0.7495)},
    ),
    "`dynamic_sample`, 48 % of groups with signal": (
        resampled,
        {0.0: (2.0965, 1), 0.3: (1.9650, 0.9622)},
    ),
    "`prompt_sampling variance`": (weighted, {0.0: (1, 1), 0.3: (1, 1)}),
    **{
        f"`prompt_sampling_kwargs.probe {kind}`": (
            partial(probed, kind=kind),
            {0.0: (1, 1), 0.3: (1, 1)},
        )
        for kind in ("text", "policy")
    },
    "`prompt_sampling_kwargs.max_generations 4`": (sized, {0.0: (1, 1), 0.3: (1, 1)}),
    "`prompt_sampling_kwargs.pilot 2`": (piloted, {0.3: (1, 1)}),
    "another rollout policy, no correction": (
        off_policy,
        {0.0: (1.0898, 0.9791), 0.3: (0.9062, 0.9704)},
    ),
    "`sequence_truncate`, no bound": (
        lambda beta: off_policy(beta, "sequence_truncate"),
        {0.0: (1, 1), 0.3: (1, 1)},
    ),
    "`sequence_truncate` at 1.2": (
        lambda beta: off_policy(beta, "sequence_truncate", 1.2),
        {0.0: (0.9876, 0.9964), 0.3: (0.9692, 0.9974)},
    ),
    "`sequence_mask` at 1.2": (
        lambda beta: off_policy(beta, "sequence_mask", 1.2),
        {0.0: (0.9939, 0.8871), 0.3: (0.8371, 0.7554)},
    ),
    "`token_truncate`, no bound": (
        lambda beta: off_policy(beta, "token_truncate", **TOKEN),
        {0.0: (0.8680, 0.9873), 0.3: (0.8132, 0.9905)},
    ),
    "`token_mask` at 1.2": (
        lambda beta: off_policy(beta, "token_mask", 1.2, **TOKEN),
        {0.0: (0.7517, 0.7475), 0.3: (0.4730, 0.5839)},
    ),
    "`kl_estimator exact`": (lambda beta: of_policy(beta, **EXACT), {0.3: (1, 1)}),
    "`kl_estimator exact`, `kl_placement reward_to_go`": (
        lambda beta: of_policy(beta, **EXACT, **TO_GO),
        {0.3: (1, 1)},
    ),
    "`kl_estimator exact`, `kl_placement loss`": (
        lambda beta: of_policy(beta, **EXACT, kl_placement="loss"),
        {0.3: (1.0925, 0.9925)},
    ),
    "`kl_estimator exact`, `mean_level batch`": (
        lambda beta: of_two_prompts(beta, **EXACT, mean_level="batch"),
        {0.3: (1, 1)},
    ),
    "`kl_estimator exact`, rewards missing for 25 % of each prompt's completions": (
        missing(0.25, 0.25, **EXACT),
        {0.3: (0.8086, 1)},
    ),
    "the same, `preset trl`": (
        missing(0.25, 0.25, **EXACT, preset="trl"),
        {0.3: (0.5625, 1)},
    ),
    "`kl_estimator exact`, `mask_truncated_completions`, 64 % truncated": (
        lambda beta: of_policy(beta, **EXACT, **MASKED),
        {0.3: (0.3964, 0.3474)},
    ),
    "`kl_estimator exact`, `dynamic_sample`, 48 % of groups with signal": (
        lambda beta: resampled(beta, **EXACT),
        {0.3: (2.0410, 0.9397)},
    ),
    "`kl_estimator exact`, another rollout policy, no correction": (
        lambda beta: off_policy(beta, **EXACT),
        {0.3: (0.9892, 0.9148)},
    ),
    "`kl_estimator exact`, `sequence_truncate`, no bound": (
        lambda beta: off_policy(beta, "sequence_truncate", **EXACT),
        {0.3: (1, 1)},
    ),
    "`kl_estimator exact`, `token_truncate`, no bound": (
        lambda beta: off_policy(beta, "token_truncate", **TOKEN, **EXACT),
        {0.3: (0.7520, 0.9685)},
    ),
}
CASES = [(name, beta) for name, (_, figures) in COSTS.items() for beta in figures]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beta"), CASES)
def test_the_bias_of_an_option_through_the_production_path_is_as_stated(name, beta):
    make, figures = COSTS[name]
    made = make(beta)
    case, rollouts = made if isinstance(made, tuple) else (made, None)
    found, exact = case.expected(rollouts), case.exact(beta)
    assert compare(found, exact) == pytest.approx(figures[beta], abs=1e-4)
    if figures[beta] == (1, 1):
        assert (found - exact).norm() < 1e-6 * exact.norm()  # a few parts are float32


def test_dynamic_sampling_without_kl_divides_the_exact_gradient_by_the_chance_of_signal():
    case, rollouts = resampled(0.0)
    share = sum(chance for chance, _ in rollouts) / 2
    exact = case.exact(0.0)
    assert share == pytest.approx(0.48, abs=5e-3)
    assert (case.expected(rollouts) * share - exact).norm() < 1e-6 * exact.norm()


def test_running_normalisation_divides_the_reward_and_not_beta():
    case, beta = after_others(0.3, normalize_rewards="running"), 0.3
    deviation = torch.tensor([0.3, 1.2, -0.5, 0.7]).double().std()
    of_reward = case.exact(0.0)
    expected = of_reward / deviation + (case.exact(beta) - of_reward)
    assert (case.expected() - expected).norm() < 1e-6 * expected.norm()


def test_the_documented_table_is_that_of_the_costs():
    text = (Path(__file__).parents[2] / "docs/algorithm.md").read_text(encoding="utf-8")
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5:
            rows.setdefault(cells[0], cells[1:])
    for name, (_, figures) in COSTS.items():
        cells = [f"{x:.4g}" if x == 1 else f"{x:.4f}" for b in figures for x in figures[b]]
        assert [cell for cell in rows[name] if cell != "–"] == cells, name
