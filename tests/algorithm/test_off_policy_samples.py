"""What the default correction of older samples does to a step: its gradient by hand, and the guard
that makes a step on few effective samples a small one."""

import math
from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.update import update
from rloo.config.async_validation import correction_of
from support.models import make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import terms_of


def older(policy, seed=1, scale=0.5):
    """Samples whose behavior log-probs are those of the policy, but for noise."""
    torch.manual_seed(seed)
    found = []
    for sample in make_samples():
        with torch.no_grad():
            now = policy.logprobs(policy.batch([sample])).logprobs
        # A factor for the whole completion and one for each token, above 1 and below.
        noise = scale * torch.randn(1) / len(now) + 0.3 * scale * torch.randn(len(now))
        behavior = (now + noise).tolist()
        found.append(replace(sample, policy_logprobs=behavior, behavior_logprobs=behavior))
    return found


def leave_one_out(samples):
    for sample in samples:
        others = [s.reward for s in samples if s.key[0] == sample.key[0] and s is not sample]
        yield sample.reward - sum(others) / len(others)


def by_hand(policy, samples, level, threshold):
    """Minus the mean over completions of sum_t w A grad log p: with one w for a completion the
    product of its tokens' ratios, with one for a token its own, at most `threshold`."""
    policy.stepper.clear()
    weights = []
    for sample, advantage in zip(samples, leave_one_out(samples), strict=True):
        logprobs = policy.logprobs(policy.batch([sample])).logprobs
        ratio = (logprobs.detach() - torch.tensor(sample.behavior_logprobs)).double()
        weight = ratio.exp() if level == "token" else ratio.sum().exp().expand(len(ratio))
        weight = weight.clamp(max=threshold)
        weights.append(weight)
        (-(weight * advantage * logprobs).sum() / len(samples)).backward()
    gradients = {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    policy.stepper.clear()
    return gradients, weights


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_gradient_of_the_default_correction_is_the_one_written_by_hand(level):
    config = make_policy_config(
        beta=0.0, importance_sampling_level=level, max_staleness=1, max_grad_norm=0.0
    )
    assert correction_of(config) == {} and config.rollout_importance_sampling_threshold == 2.0
    policy, terms = make_policy_of(config), terms_of(config)
    samples = older(policy, scale=4.0)
    expected, weights = by_hand(policy, samples, level, 2.0)
    flat = torch.cat(weights)
    assert flat.min() < 0.8 and (flat == 2.0).any()
    seen = {}
    policy.stepper.before_step = lambda: seen.update(
        {n: p.grad.clone() for n, p in policy.model.named_parameters()}
    )
    metrics = update(policy, samples, compute_advantages(samples, policy, terms), terms)
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-7)
    means = torch.stack([weight.mean() for weight in weights])
    share = means.sum() ** 2 / (len(means) * (means**2).sum())
    assert metrics["sampling/effective_share"] == pytest.approx(share.item(), rel=1e-5)
    mean = metrics["sampling/importance_sampling_ratio/mean"]
    assert mean == pytest.approx(flat.mean().item(), rel=1e-5)


def test_the_guard_multiplies_the_step_by_the_root_of_the_effective_share():
    """With plain gradient descent, whose step is the learning rate times the gradient."""
    moved, shares, rates = {}, {}, {}
    for guard in (False, True):
        config = make_policy_config(
            beta=0.0,
            max_staleness=1,
            async_kwargs={"ess_guard": guard},
            optim="sgd",
            learning_rate=0.1,
        )
        policy, terms = make_policy_of(config), terms_of(config)
        samples = older(policy, scale=2.0)
        before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
        metrics = update(policy, samples, compute_advantages(samples, policy, terms), terms)
        moved[guard] = {n: p.detach() - before[n] for n, p in policy.model.named_parameters()}
        shares[guard], rates[guard] = metrics["sampling/effective_share"], metrics["learning_rate"]
        assert policy.stepper.optimizer.param_groups[0]["lr"] == policy.stepper.learning_rate
    assert shares[True] == shares[False] < 0.9 and rates[True] == rates[False]
    factor = math.sqrt(shares[True])
    for name, step in moved[False].items():
        torch.testing.assert_close(moved[True][name], factor * step, rtol=1e-3, atol=1e-7)
