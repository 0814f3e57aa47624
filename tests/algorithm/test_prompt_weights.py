"""Weighted prompts: averaged over all draws and all groups, the production loss has the gradient of
uniform drawing, whatever the estimates of the rewards' deviation are."""

import itertools

import numpy as np
import pytest
import torch

from rloo.config.config import RLOOConfig
from rloo.data.group_budget import GroupBudget
from rloo.tools.exact_gradient import TabularPolicy, all_draws, logits_table
from rloo.types import Prompt
from support.bandits import BanditGroup, TokenTables, rollout_loss
from support.production import GRADED, Production
from support.weighted_rollouts import drawn_rollouts

REWARDS = ([0.1, 1.0, 0.3], [1.0, 1.0, 1.0], [-2.0, 0.4, 3.0])
BANDITS = [
    TabularPolicy(
        logits_table(2 * n, 2), logits_table(2 * n + 1, 2), torch.tensor(r, dtype=torch.float64)
    )
    for n, r in enumerate(REWARDS)
]
# N q: uniform; what a perfect estimate says; the opposite; a value near the floor of 1e-3.
SHARES = {
    "uniform": [1.0, 1.0, 1.0],
    "right": [0.6, 0.25, 2.15],
    "wrong": [1.0, 1.75, 0.25],
    "hostile": [1e-3, 2.998, 1e-3],
}


def form(**options) -> RLOOConfig:
    usual = {"beta": 0.3, "num_generations": 2, "num_prompts": 2, "max_completion_length": 2}
    return RLOOConfig(**{**usual, "prompt_sampling": "variance", **options})


class Tables:
    """The logits of all prompts, as one parameter."""

    def __init__(self):
        self.theta = torch.stack([b.logits for b in BANDITS]).clone().requires_grad_()
        lengths = [b.length_S.tolist() for b in BANDITS]
        self.logprobs = [
            b.token_logprobs(logits).split(n)
            for b, logits, n in zip(BANDITS, self.theta, lengths, strict=True)
        ]
        squares = [b.logits.softmax(-1).square().sum(-1)[b.state_T] for b in BANDITS]
        self.tables = [
            TokenTables(b.token_logprobs(b.reference).split(n), collision=s.split(n))
            for b, n, s in zip(BANDITS, lengths, squares, strict=True)
        ]

    def expected(self, draws, config, sizes=None) -> torch.Tensor:
        """The expected loss of a rollout with these (prompt, weight), and with the numbers `sizes`
        of completions."""
        total = torch.zeros((), dtype=torch.float64)
        numbers = sizes or [None] * len(draws)
        prompts = [
            Prompt(n, [1], "x", weight=w, num_completions=k)
            for (n, w), k in zip(draws, numbers, strict=True)
        ]
        every = [
            itertools.product(
                range(len(BANDITS[p.id].sequences)),
                repeat=p.num_completions or config.num_generations,
            )
            for p in prompts
        ]
        for parts in itertools.product(*every):
            groups = [
                BanditGroup(
                    self.logprobs[p.id], self.tables[p.id], BANDITS[p.id].reward_S, members,
                    p.completion_weight(config.num_generations),
                )
                for p, members in zip(prompts, parts, strict=True)
            ]  # fmt: skip
            chance = sum(g.logprobs[m].sum().item() for g in groups for m in g.members)
            total = total + np.exp(chance) * rollout_loss(groups, config)
        return total

    def gradient(self, total) -> torch.Tensor:
        return -torch.autograd.grad(total, self.theta, retain_graph=True)[0]


FORMS = {
    "KL in the reward": {},
    "no KL": {"beta": 0.0},
    "KL in the loss": {"kl_placement": "loss", "kl_estimator": "k3"},
    "entropy": {"entropy_coef": 0.1, "beta": 0.0},
    "by token": {"importance_sampling_level": "token", "kl_placement": "reward_to_go"},
    "GRPO": {"preset": "grpo"},
    "Dr. GRPO": {"preset": "dr_grpo"},
    "mean of tokens": {"loss_aggregation": "sequence_token_mean"},
    "regression": {"estimator": "regression"},
}


FAST = ("KL in the reward", "KL in the loss")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in FORMS]
)
def test_the_expected_gradient_is_that_of_uniform_drawing(name):
    config, tables = form(**FORMS[name]), Tables()
    alone = sum(tables.expected([(n, 1.0)], config) for n in range(3)) / 3
    uniform = tables.gradient(alone)
    assert uniform.norm() > 1e-2
    if name in ("KL in the reward", "no KL"):
        exact = torch.stack([b.exact_gradient(config.beta) for b in BANDITS]) / 3
        assert (uniform - exact).abs().max() < 1e-12
    hostile = ("hostile",) if name in FAST else ()
    for share in ("right", "wrong", *hostile):
        draws = list(all_draws(SHARES[share], 2))
        assert sum(chance for chance, _ in draws) == pytest.approx(1.0)
        total = sum(chance * tables.expected(drawn, config) for chance, drawn in draws)
        assert (tables.gradient(total) - uniform).abs().max() < 1e-12, share


def test_a_weight_of_the_policy_term_alone_would_be_found():
    """The oracle: without weights the same draws have another gradient."""
    config, tables = form(), Tables()
    uniform = tables.gradient(sum(tables.expected([(n, 1.0)], config) for n in range(3)) / 3)
    plain = [(c, [(n, 1.0) for n, _ in drawn]) for c, drawn in all_draws(SHARES["right"], 2)]
    total = sum(chance * tables.expected(drawn, config) for chance, drawn in plain)
    assert (tables.gradient(total) - uniform).abs().max() > 1e-2


# The defaults are rows of `test_costs.py`.
IN_THE_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}


def production(**options) -> Production:
    """A transformer, through shaping, credit and update."""
    plain = {"bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    config = form(**plain, max_completion_length=1, **options)
    return Production(config, rewards=GRADED, longest=1, seed=9)


@pytest.mark.slow
def test_weights_reach_the_optimizer_from_the_prompt():
    case = production(**IN_THE_LOSS)
    uniform = case.expected()
    rollouts = list(drawn_rollouts(case, all_draws([0.4, 1.6], 2)))
    assert len({tuple(g.prompt.id for g in groups) for _, groups in rollouts}) == 2
    assert (case.expected(rollouts) - uniform).norm() < 1e-6 * uniform.norm()


# Spreads, by prompt, that decide on numbers of completions: the others than are right, too.
SPREADS = ([0.0, 5.0, 1.0], [3.0, 1.0, 0.0], [1.0, 0.0, 40.0])
SIZES = GroupBudget(num_generations=3, max_generations=4, num_prompts=2)
SIZED = ("KL in the reward", "no KL", "KL in the loss", "entropy", "by token", "mean of tokens",
         "regression")  # fmt: skip


def sizes_of(drawn, spread) -> list[int]:
    return SIZES.sizes(np.array([spread[n] for n, _ in drawn]))


def test_each_prompt_has_its_weight_whatever_the_number_of_its_completions():
    """One rollout, of 2 and 4 completions: its parts are those of 3 each."""
    config, tables = form(num_generations=3), Tables()
    usual = tables.expected([(0, 2.5)], config) + tables.expected([(2, 0.4)], config)
    found = tables.expected([(0, 2.5), (2, 0.4)], config, [2, 4])
    usual, found = tables.gradient(usual) / 2, tables.gradient(found)
    assert (found - usual).abs().max() < 1e-12 < 1e-2 < usual.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spread"), [(n, s) for n in SIZED for s in SPREADS if s == SPREADS[0] or n in FAST[:1]]
)
def test_with_other_numbers_of_completions_the_expected_gradient_is_the_same(name, spread):
    config, tables = form(num_generations=3, **FORMS[name]), Tables()
    uniform = tables.gradient(sum(tables.expected([(n, 1.0)], config) for n in range(3)) / 3)
    total, seen = 0.0, set()
    for chance, drawn in all_draws(SHARES["right"], 2):
        sizes = sizes_of(drawn, spread)
        seen |= {*sizes}
        total = total + chance * tables.expected(drawn, config, sizes)
    assert seen == {2, 3, 4}
    assert (tables.gradient(total) - uniform).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "weighted"), [("no KL", False), ("GRPO", True)])
def test_numbers_of_completions_without_their_weight_would_be_found(name, weighted):
    """The oracle. And an estimator whose deviation is that of the group has another gradient: it is
    refused."""
    config, tables = form(num_generations=3, **FORMS[name]), Tables()
    uniform = tables.gradient(sum(tables.expected([(n, 1.0)], config) for n in range(3)) / 3)
    total = 0.0
    for chance, drawn in all_draws(SHARES["right"], 2):
        sizes = sizes_of(drawn, SPREADS[0])
        factors = [1.0 if weighted else size / 3 for size in sizes]
        draws = [(n, w * f) for (n, w), f in zip(drawn, factors, strict=True)]
        total = total + chance * tables.expected(draws, config, sizes)
    assert (tables.gradient(total) - uniform).abs().max() > 1e-3


@pytest.mark.slow
def test_numbers_of_completions_reach_the_optimizer_from_the_prompt():
    case = production(
        num_generations=3, prompt_sampling_kwargs={"max_generations": 4}, **IN_THE_LOSS
    )
    uniform, seen = case.expected(), set()

    def sizes(draws):
        seen.update(found := sizes_of(draws, [1.0, 5.0]))
        return found

    rollouts = drawn_rollouts(case, all_draws([0.4, 1.6], 2), sizes)
    assert (case.expected(rollouts) - uniform).norm() < 1e-6 * uniform.norm()
    assert seen == {2, 3, 4}
