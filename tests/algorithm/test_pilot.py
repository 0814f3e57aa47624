"""Two-stage numbers of completions: averaged over every pilot, the numbers that follow from its
rewards, and every second stage, the gradient is the exact one of K completions per prompt."""

import itertools
import json
import math
from functools import cache

import pytest
import torch

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.config.config import RLOOConfig
from rloo.data.group_budget import GroupBudget
from rloo.tools.exact_gradient import TabularPolicy, logits_table
from rloo.types import Completion, Group, Prompt
from support.bandits import BanditGroup, TokenTables, rollout_loss
from support.production import GRADED, Production, draws_of
from support.terms import advantages, rollout_of
from support.weighted_rollouts import make_pilot_sampler, pilot_rollouts, second_sizes

PILOT, K, MOST = 2, 4, 5
REWARDS = ([0.1, 1.0, 0.3], [1.0, -2.0, 1.0])
BANDITS = [
    TabularPolicy(
        logits_table(2 * n, 2), logits_table(2 * n + 1, 2), torch.tensor(r, dtype=torch.float64)
    )
    for n, r in enumerate(REWARDS)
]
WEIGHTS = (1.7, 0.3)


def config_of(**options) -> RLOOConfig:
    kwargs = {"pilot": PILOT, "max_generations": MOST}
    usual = {"beta": 0.3, "num_generations": K, "num_prompts": 2, "max_completion_length": 2}
    return RLOOConfig(
        **usual | {"prompt_sampling": "variance", "prompt_sampling_kwargs": kwargs} | options
    )


BUDGET = GroupBudget(K, MOST, num_prompts=2, pilot=PILOT)


class Tables:
    """The expected loss of one prompt, by its pilot and the number of completions that follow."""

    def __init__(self, config, group=BanditGroup):
        self.config, self.group = config, group
        self.theta = torch.stack([b.logits for b in BANDITS]).clone().requires_grad_()
        self.logprobs = [
            b.token_logprobs(logits).split(b.length_S.tolist())
            for b, logits in zip(BANDITS, self.theta, strict=True)
        ]
        squares = [b.logits.softmax(-1).square().sum(-1)[b.state_T] for b in BANDITS]
        self.tables = [
            TokenTables(
                b.token_logprobs(b.reference).split(b.length_S.tolist()),
                collision=s.split(b.length_S.tolist()),
            )
            for b, s in zip(BANDITS, squares, strict=True)
        ]
        self.chances = [b.logprob_S(b.logits).exp().tolist() for b in BANDITS]
        self.after = cache(self._after)

    def _loss(self, prompt, members, pilot=None):
        """As a part of a loss over 2 K completions."""
        drawn = Prompt(
            prompt, [1], "x", weight=WEIGHTS[prompt], num_completions=len(members), pilot=pilot
        )
        first, last = (drawn.completion_weight(K, index) for index in (0, len(members) - 1))
        group = self.group(
            self.logprobs[prompt], self.tables[prompt], BANDITS[prompt].reward_S, members,
            first, pilot, last,
        )  # fmt: skip
        return rollout_loss([group], self.config) * len(members) / (2 * K)

    def _after(self, prompt, pilot, more):
        return sum(
            chance * self._loss(prompt, (*pilot, *others), len(pilot))
            for chance, others in draws_of(self.chances[prompt], more)
        )

    def equal(self) -> torch.Tensor:
        """The expected loss of K completions each, in one stage."""
        return sum(
            chance * self._loss(prompt, members)
            for prompt in range(2)
            for chance, members in draws_of(self.chances[prompt], K)
        )

    def two_stages(self) -> tuple[torch.Tensor, set[int]]:
        """The expected loss, and the numbers that occurred."""
        total, seen = torch.zeros((), dtype=torch.float64), set()
        pilots = [list(draws_of(chances, PILOT)) for chances in self.chances]
        for (one, first), (other, second) in itertools.product(*pilots):
            rewards = [[REWARDS[0][s] for s in first], [REWARDS[1][s] for s in second]]
            sizes = second_sizes(BUDGET, rewards, WEIGHTS)
            seen |= {*sizes}
            for prompt, (pilot, more) in enumerate(zip((first, second), sizes, strict=True)):
                total = total + one * other * self.after(prompt, pilot, more)
        return total, seen

    def gradient(self, total) -> torch.Tensor:
        return -torch.autograd.grad(total, self.theta, retain_graph=True)[0]


TOKEN = {"importance_sampling_level": "token"}
FORMS = {
    "KL in the reward": {},
    "no KL": {"beta": 0.0},
    "KL in the loss": {"kl_placement": "loss", "kl_estimator": "k3"},
    "rloo": {"estimator": "rloo"},
    "length-weighted": {"estimator": "length_weighted"},
    "optimal token": {"estimator": "optimal_token", **TOKEN},
    "optimal token, no KL": {"estimator": "optimal_token", "beta": 0.0, **TOKEN},
    "regression": {"estimator": "regression"},
    "reward to go": {"kl_placement": "reward_to_go", **TOKEN},
}
FAST = ("KL in the reward", "length-weighted", "optimal token")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FORMS]
)
def test_the_expected_gradient_is_that_of_k_completions_each(name):
    tables = Tables(config_of(**FORMS[name]))
    total, seen = tables.two_stages()
    assert seen == {1, 2, 3}
    found, equal = tables.gradient(total), tables.gradient(tables.equal())
    assert equal.norm() > 1e-2
    assert (found - equal).abs().max() < 1e-12
    if name != "KL in the loss":
        beta = tables.config.beta
        exact = torch.stack(
            [w * b.exact_gradient(beta) for w, b in zip(WEIGHTS, BANDITS, strict=True)]
        )
        assert (found - exact / 2).abs().max() < 1e-12


class OneBaseline(BanditGroup):
    """The baselines of the pilot include the second stage."""

    def pilots(self):
        return [False] * len(self.members)

    def weights(self):
        return BanditGroup(*self).weights()


class OneWeight(BanditGroup):
    """As if the numbers did not depend on the pilot."""

    def weights(self):
        whole = sum(BanditGroup(*self).weights())
        return [whole / len(self.members)] * len(self.members)


@pytest.mark.parametrize("group", [OneBaseline, OneWeight])
def test_a_baseline_or_a_weight_that_depends_on_the_number_would_be_found(group):
    tables = Tables(config_of(), group)
    total, _ = tables.two_stages()
    assert (tables.gradient(total) - tables.gradient(tables.equal())).abs().max() > 1e-4


def test_a_completion_of_the_pilot_has_the_weight_that_it_has_in_a_group_of_k():
    drawn = Prompt(0, [1], "x", weight=0.5, num_completions=9, pilot=3)
    weights = [drawn.completion_weight(7, index) for index in range(9)]
    assert weights == [0.5] * 3 + [0.5 * 4 / 6] * 6
    assert sum(weights) == pytest.approx(7 * 0.5)
    assert drawn.completion_weight(7) * 9 == pytest.approx(7 * 0.5)


def test_baselines_of_a_pilot_are_those_of_the_pilot():
    """By hand, with a completion without a score."""
    rewards = [1.0, 0.0, math.nan, 4.0, 2.0]
    drawn = Prompt(0, [1], "x", num_completions=5, pilot=3)
    members = [Completion([1], "stop", [0.0], [0.0]) for _ in rewards]
    group = Group(drawn, members, [""] * 5, [None if r != r else r for r in rewards])
    config = config_of(beta=0.0)
    samples = make_training_samples(rollout_of([group]), config)
    assert [s.pilot for s in samples] == [True, True, False, False]
    returns = EstimatorInput(
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(5, dtype=torch.float64),
        torch.arange(5),
        torch.zeros(5, dtype=torch.long),
        torch.zeros(5, dtype=torch.bool),
        pilot_N=torch.tensor([True, True, True, False, False]),
    )
    found = advantages(returns, config)
    assert found.tolist() == [1.0, -1.0, 0.0, 4.0 - 1.0, 2.0 - 5 / 3]


def test_a_group_whose_pilot_has_one_score_does_not_train():
    drawn = Prompt(0, [1], "x", num_completions=4, pilot=2)
    members = [Completion([1], "stop", [0.0], [0.0]) for _ in range(4)]
    group = Group(drawn, members, [""] * 4, [1.0, None, 0.0, 2.0])
    assert make_training_samples(rollout_of([group]), config_of()) == []
    group.rewards[1] = 0.5
    assert len(make_training_samples(rollout_of([group]), config_of())) == 4


def test_numbers_follow_from_the_pilot_and_the_state_does_not_change():
    sampler = make_pilot_sampler(BUDGET)
    draws = sampler.next(2)
    assert [draw.num_completions for draw in draws] == [PILOT] * 2
    before = json.dumps(sampler.state_dict())

    def sizes(*rewards):
        groups = [
            Group(Prompt(n, [1], "x", num_completions=PILOT), [], [], [*some])
            for n, some in enumerate(rewards)
        ]
        found = sampler.second_sizes(groups)
        assert found == sampler.second_sizes(groups)
        return found

    assert sizes([0.5, 0.5], [0.0, 1.0]) == [1, 3]
    assert sizes([0.0, 1.0], [0.5, 0.5]) == [3, 1]
    assert sizes([0.0, 1.0], [1.0, 0.0]) == [2, 2]
    assert json.dumps(sampler.state_dict()) == before


@pytest.mark.slow
def test_pilots_reach_the_optimizer_from_the_prompt():
    """A transformer in float64, through shaping, advantages and update. The defaults are a row of
    `test_costs.py`."""
    config = config_of(
        bf16=False, use_cpu=True, gradient_checkpointing=False, max_completion_length=1,
        estimator="optimal_token", **TOKEN,
    )  # fmt: skip
    case, seen = Production(config, rewards=GRADED, longest=1, seed=9), set()

    def sizes_of(rewards):
        seen.update(found := second_sizes(BUDGET, rewards))
        return found

    found, exact = case.expected(pilot_rollouts(case, PILOT, sizes_of)), case.exact(config.beta)
    assert seen == {1, 2, 3}
    assert (found - exact).norm() < 1e-6 * exact.norm()
