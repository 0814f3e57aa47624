"""A small asynchronous schedule, enumerated: what training on older samples gives on average.

Two rollouts are begun with the weights theta_0, as max_staleness 1 allows. The first is trained,
which gives theta_1, another one for each of its outcomes; then the second, which theta_0 sampled,
at theta_1. The production loss is averaged over every group that the second could be.
"""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rloo.algorithm.advantages import Advantages, add_advantages
from rloo.algorithm.loss import loss_denominator
from rloo.algorithm.update import micro_batch_loss
from rloo.model.logprobs import TokenScores
from rloo.tools.exact_gradient import TabularPolicy, logits_table
from support.markers import slow
from support.policies import make_policy_config
from support.terms import terms_of

REWARDS = torch.tensor([0.1, 1.0, 0.3, 0.0, -0.5, 2.0, 0.7], dtype=torch.float64)
BANDIT = TabularPolicy(logits_table(0, 3), logits_table(1, 3), REWARDS)
# All groups: one of them for all orders, which change nothing, and how many these are.
GROUPS = Counter(
    tuple(sorted(group)) for group in itertools.product(range(len(BANDIT.sequences)), repeat=3)
)
THETA_0 = BANDIT.logits
# So large that the ratios of theta_1 to theta_0 are from 0.06 to 3.5.
STEP = 2.0
# Outcomes of the first rollout, of which each leads to another theta_1.
OUTCOMES = [(0, 1, 5), (4, 5, 6), (2, 3, 4), (1, 1, 4)]
UNBOUNDED = 1e9
# How long each of the seven completions takes to sample.
SECONDS = torch.tensor([1.0, 7.0, 2.0, 3.0, 4.0, 6.0, 5.0])


def gradient(theta: Tensor, sampler: Tensor, group: tuple[int, ...], config) -> Tensor:
    """Of the production loss of one group, which `sampler` sampled, by the logits `theta`."""
    theta = theta.clone().requires_grad_()
    lengths = BANDIT.length_S[list(group)].tolist()
    tokens = [
        torch.cat([table.split(BANDIT.length_S.tolist())[s] for s in group])
        for table in (BANDIT.token_logprobs(theta), BANDIT.token_logprobs(sampler))
    ]
    now, behavior = tokens
    size = len(group)
    batch = SimpleNamespace(
        size=size,
        sequence_T=torch.arange(size).repeat_interleave(torch.tensor(lengths)),
        group_N=torch.zeros(size, dtype=torch.long),
        all_scored=False,
        reward_N=REWARDS[list(group)],
        weight_N=torch.ones(size, dtype=torch.float64),
        truncated_N=torch.zeros(size, dtype=torch.bool),
        pilot_N=None,
        coefficient_N2=None,
        keys=[(0, index) for index in range(size)],
        lengths=lengths,
        policy_T=behavior,
        behavior_T=behavior,
    )
    scores = TokenScores(now, torch.zeros_like(now), None)
    policy = SimpleNamespace(logprobs=lambda *_, **__: scores)
    terms = terms_of(config)
    credit = Advantages()
    add_advantages(credit, batch, scores, terms)
    denominator = loss_denominator(
        config.loss_aggregation, num_sequences=size, num_tokens=len(now), constant=None
    )
    loss, _ = micro_batch_loss(policy, batch, credit, terms, denominator)
    return -torch.autograd.grad(loss, theta)[0]


def probability(theta: Tensor, group: tuple[int, ...]) -> Tensor:
    return GROUPS[group] * BANDIT.logprob_S(theta)[list(group)].sum().exp()


def config_of(threshold: float | None = None):
    options = {"beta": 0.0, "num_generations": 3}
    if threshold is not None:
        options |= {"rollout_importance_sampling_mode": "sequence_truncate"}
        options |= {"rollout_importance_sampling_threshold": threshold}
    return make_policy_config(**options)


def mean_gradient(theta: Tensor, sampler: Tensor, config) -> Tensor:
    parts = [probability(sampler, g) * gradient(theta, sampler, g, config) for g in GROUPS]
    return torch.stack(parts).sum(0)


def exact(theta: Tensor) -> Tensor:
    return TabularPolicy(theta, theta, REWARDS).exact_gradient(0.0)


def compare(found: Tensor, true: Tensor) -> tuple[float, float]:
    """Cosine, and length along the true gradient."""
    cosine = torch.cosine_similarity(found.flatten(), true.flatten(), dim=0)
    return cosine.item(), ((found * true).sum() / (true * true).sum()).item()


def second_rollout(threshold: float | None) -> list[tuple[Tensor, Tensor]]:
    """The mean gradient of the second rollout, and the exact one, for each outcome of the first."""
    found = []
    for outcome in OUTCOMES:
        theta_1 = THETA_0 + STEP * gradient(THETA_0, THETA_0, outcome, config_of(UNBOUNDED))
        mean = mean_gradient(theta_1, THETA_0, config_of(threshold))
        found.append((mean, exact(theta_1)))
    return found


def test_in_dispatch_order_with_full_ratios_older_samples_are_unbiased():
    for mean, true in second_rollout(UNBOUNDED):
        assert (mean - true).abs().max() < 1e-12
    assert (mean_gradient(THETA_0, THETA_0, config_of()) - exact(THETA_0)).abs().max() < 1e-12


# docs/algorithm.md has these: the smallest cosine, and the scales, over the outcomes.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("threshold", "cosine", "scales"),
    [
        (2.0, 0.9797, (0.6136, 1.0)),
        slow(1.0, 0.8953, (0.3426, 0.8457)),
        slow(None, 0.7450, (0.4232, 1.0378)),
    ],
    ids=["truncated at 2", "truncated at 1", "without correction"],
)
def test_the_bias_of_truncation_and_of_no_correction(threshold, cosine, scales):
    found = [compare(*both) for both in second_rollout(threshold)]
    assert min(c for c, _ in found) == pytest.approx(cosine, abs=5e-4)
    lengths = [scale for _, scale in found]
    assert (min(lengths), max(lengths)) == pytest.approx(scales, abs=5e-4)


def test_the_bias_of_training_on_who_is_done_first():
    """Of two groups under way the trainer takes the one whose longest completion is done first, and
    the other is dropped as too old."""
    config = config_of()
    known = [
        (probability(THETA_0, g), SECONDS[list(g)].max(), gradient(THETA_0, THETA_0, g, config))
        for g in GROUPS
    ]
    chances = torch.stack([p for p, _, _ in known])
    times = torch.stack([t for _, t, _ in known])
    # The chance that a group is trained: the other one takes longer, or as long and loses a coin.
    taken = [
        p * ((chances * (times > t)).sum() + 0.5 * (chances * (times == t)).sum())
        for p, t, _ in known
    ]
    first = 2 * sum(share * g for share, (_, _, g) in zip(taken, known, strict=True))
    assert compare(first, exact(THETA_0)) == pytest.approx((0.9819, 1.0016), abs=5e-4)
    both = sum(p * g for p, _, g in known)
    assert compare(both, exact(THETA_0)) == pytest.approx((1.0, 1.0), abs=1e-12)
