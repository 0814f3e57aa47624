"""The optimal token baseline beside its definition in plain Python, and the norms that it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.token_baselines import optimal_token
from rloo.algorithm.token_values import score_first, token_values
from rloo.algorithm.update import update
from support.models import make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import advantages, changed, make_returns, terms_of, two_groups

TOKEN = {"estimator": "optimal_token", "importance_sampling_level": "token"}


def rows_of(returns: EstimatorInput) -> list[tuple[int, list[float], list[float]]]:
    """The group, the returns to go and the sums of norms of each completion."""
    rows = []
    for i in range(returns.num_completions):
        tokens = returns.sequence_T == i
        penalties = returns.penalty_T[tokens].tolist()
        norms = returns.score_norm_T[tokens].tolist()
        reward = returns.reward_N[i].item()
        to_go = [reward - sum(penalties[t:]) for t in range(len(penalties))]
        energy = [sum(norms[: t + 1]) for t in range(len(norms))]
        rows.append((int(returns.group_N[i]), to_go, energy))
    return rows


def left_out(rows, i: int) -> list[float]:
    group, own, _ = rows[i]
    others = [row[1:] for j, row in enumerate(rows) if row[0] == group and j != i]
    found = []
    for t, value in enumerate(own):
        here = [(g[t], w[t]) for g, w in others if len(g) > t]
        here = here or [(g[-1], w[-1]) for g, w in others]
        found.append(value - sum(w * g for g, w in here) / sum(w for _, w in here))
    return found


def left_in(rows, i: int) -> list[float]:
    """verl's function, with its zero tail."""
    group, own, _ = rows[i]
    members = [row[1:] for row in rows if row[0] == group]
    second = sorted(len(g) for g, _ in members)[-2]
    found = []
    for t, value in enumerate(own):
        here = [(g[t], w[t]) for g, w in members if len(g) > t]
        baseline = sum(w * g for g, w in here) / (sum(w for _, w in here) + 1e-8)
        found.append(value - (baseline if t < second else 0.0))
    return found


@pytest.mark.parametrize("kl", [True, False])
def test_it_is_its_definition_with_and_without_the_completion_itself(kl):
    for seed in range(20):
        returns = make_returns(seed, kl=kl, norms=True)
        rows = rows_of(returns)
        for leave1out, definition in ((True, left_out), (False, left_in)):
            expected = [x for i in range(len(rows)) for x in definition(rows, i)]
            found = optimal_token(returns, leave1out).tolist()
            assert found == pytest.approx(expected, abs=1e-6)


def test_a_baseline_does_not_depend_on_its_own_completion():
    for seed in range(10):
        returns = make_returns(seed, norms=True)
        for i in range(returns.num_completions):
            other = changed(returns, i)
            baselines = []
            for x in (returns, other):
                values = x.reward_N[x.sequence_T] - x.penalty_to_go_T - optimal_token(x)
                baselines.append(values[x.sequence_T == i])
            shared = min(map(len, baselines))
            assert torch.allclose(*(b[:shared] for b in baselines), rtol=0.0, atol=1e-7)


def test_equal_rewards_have_advantages_of_exactly_0_and_certain_tokens_weigh_alike():
    returns = two_groups([0.1] * 4 + [1 / 3] * 4, [1, 2, 3, 4, 1, 2, 3, 4])
    norms = torch.rand(20).double()
    assert optimal_token(replace(returns, score_norm_T=norms)).eq(0).all()
    certain = two_groups([1.0, 0.0, 0.0, 0.0] * 2, [1] * 8)
    found = optimal_token(replace(certain, score_norm_T=torch.full((8,), -1e-9).double()))
    assert found.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3] * 2)


def test_truncated_completions_are_masked_in_all_their_tokens():
    returns = make_returns(3, norms=True)
    config = make_policy_config(**TOKEN, mask_truncated_completions=True)
    found = advantages(returns, config)
    masked = returns.truncated_N[returns.sequence_T]
    assert masked.any() and found[masked].eq(0).all()
    assert torch.equal(found[~masked], optimal_token(returns)[~masked])


def test_completions_without_a_reward_have_no_part_in_the_baselines_of_others():
    config = make_policy_config(**TOKEN)
    for seed in range(10):
        returns = make_returns(seed, norms=True)
        scored = torch.arange(returns.num_completions) % 3 != 1
        reward_N = torch.where(scored, returns.reward_N, torch.nan)
        found = advantages(replace(returns, reward_N=reward_N), config)
        here = scored[returns.sequence_T]
        rows = [row for row, ok in zip(rows_of(returns), scored.tolist(), strict=True) if ok]
        groups = [group for group, *_ in rows]
        expected = []
        for i, (group, own, _) in enumerate(rows):
            alone = groups.count(group) == 1
            expected += [0.0] * len(own) if alone else left_out(rows, i)
        assert found[here].tolist() == pytest.approx(expected, abs=1e-6)
        assert found[~here].eq(0).all()


@pytest.mark.parametrize("packing", [True, False])
def test_norms_are_those_of_scores_at_half_the_temperature(packing):
    """2 log p at T minus log p at T / 2 is the log of the sum of squared probabilities at T."""
    config = make_policy_config(**TOKEN, temperature=0.7, packing=packing)
    policy, terms = make_policy_of(config), terms_of(config)
    batch = policy.batch(make_samples(3, 4))
    now, half = policy.score(batch).double(), policy.score(batch, temperature=0.35).double()
    norms = token_values(score_first(policy, batch, terms), batch.sequence_T, terms).score_norm_T
    expected = 1 - 2 * now.exp() + (2 * now - half).exp()
    assert norms.min() > 0.01
    assert torch.allclose(norms, expected, rtol=0.0, atol=2e-6)


def test_without_norms_it_is_refused():
    with pytest.raises(ValueError, match="needs the squared score norm of each token"):
        optimal_token(make_returns(3))


@pytest.mark.parametrize(("leave1out", "beta"), [(True, 0.0), (True, 0.3), (False, 0.0)])
def test_cuts_of_a_batch_and_a_pass_before_the_update_have_the_same_update(leave1out, beta):
    """Groups beyond the budget, whole groups, and all: the first needs a pass of its own."""
    samples, moved, own_pass = make_samples(3, 4), [], []
    # One group of equal rewards, which is not computed without KL.
    samples = [replace(s, reward=1.0) if s.key[0] == 1 else s for s in samples]
    for max_tokens in (10, 100, 10_000):
        config = make_policy_config(
            **TOKEN,
            beta=beta,
            estimator_kwargs={"leave1out": leave1out},
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0,
            max_tokens_per_micro_batch=max_tokens,
        )
        policy, terms = make_policy_of(config), terms_of(config)
        before = torch.cat([p.detach().flatten() for p in policy.parameters])
        credit = compute_advantages(samples, policy, terms)
        own_pass.append(not credit.from_update)
        metrics = update(policy, samples, credit, terms)
        share = sum(s.key[0] != 1 for s in samples) / len(samples)
        if credit.from_update:
            skips = not beta and leave1out
            assert metrics["update/computed_share"] == pytest.approx(share if skips else 1.0)
        moved.append(torch.cat([p.detach().flatten() for p in policy.parameters]) - before)
    assert own_pass == [True, False, False]
    assert moved[0].norm() > 1e-2
    for other in moved[1:]:
        assert (other - moved[0]).norm() < 1e-5 * moved[0].norm()
