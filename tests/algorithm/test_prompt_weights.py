"""Weighted prompts: averaged over all draws and all groups, the production loss has the gradient of
uniform drawing, whatever the estimates of the rewards' deviation are."""

import itertools

import numpy as np
import pytest
import torch

from rloo.config.config import RLOOConfig
from rloo.tools.exact_gradient import TabularPolicy, all_draws, logits_table
from support.bandits import BanditGroup, TokenTables, rollout_loss
from support.production import GRADED, Production

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
        self.tables = [
            TokenTables(b.token_logprobs(b.reference).split(n))
            for b, n in zip(BANDITS, lengths, strict=True)
        ]

    def expected(self, draws, config) -> torch.Tensor:
        """The expected loss of a rollout with these (prompt, weight)."""
        size, total = config.num_generations, torch.zeros((), dtype=torch.float64)
        every = [itertools.product(range(len(BANDITS[n].sequences)), repeat=size) for n, _ in draws]
        for parts in itertools.product(*every):
            groups = [
                BanditGroup(self.logprobs[n], self.tables[n], BANDITS[n].reward_S, members, weight)
                for (n, weight), members in zip(draws, parts, strict=True)
            ]
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"kl_placement": "loss", "kl_estimator": "k3"}])
def test_weights_reach_the_optimizer_from_the_prompt(options):
    """A transformer, through shaping, credit and update: both prompts, drawn unequally."""
    config = RLOOConfig(
        bf16=False, use_cpu=True, gradient_checkpointing=False, num_generations=2, num_prompts=2,
        max_completion_length=1, beta=0.3, prompt_sampling="variance", **options,
    )  # fmt: skip
    case = Production(config, rewards=GRADED, longest=1, seed=9)
    uniform = case.expected()
    rollouts = [
        (chance * part, groups)
        for chance, drawn in all_draws([0.4, 1.6], 2)
        for part, groups in case.rollouts_of(drawn)
    ]
    assert len({tuple(g.prompt.id for g in groups) for _, groups in rollouts}) == 2
    assert (case.expected(rollouts) - uniform).norm() < 1e-6 * uniform.norm()
    if not options:
        assert (uniform - case.exact(0.3)).norm() < 1e-6 * uniform.norm()
