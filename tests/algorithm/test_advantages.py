"""What holds for every objective that can be composed, on ragged rollouts of a small model."""

import random
from dataclasses import replace

import pytest
import torch

from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.update import micro_batch_loss
from rloo.config.config import RLOOConfig
from support.markers import every_second
from support.models import make_samples
from support.policies import make_policy_config, make_policy_of
from support.terms import terms_of

SPACE = {
    # Of those that also set what no option does.
    "preset": ["trl", "areal"],
    "beta": [0.3],
    "kl_placement": ["reward_to_go", "loss"],
    "kl_estimator": ["k2", "k3"],
    "use_bias_correction_kl": [True],
    "kl_kwargs": [{"clip": 0.05}],
    "mean_level": ["batch", "none", "running"],
    "mean_leave1out": [False],
    "std_level": ["group", "batch"],
    "normalize_advantages": [True],
    "importance_sampling_level": ["token", "sequence_mean"],
    "epsilon": [0.05],
    "delta": [1.5],
    "loss_aggregation": ["sequence_token_mean", "token_mean", "constant"],
    "mask_truncated_completions": [True],
    "rollout_importance_sampling_mode": [
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
    ],
    "entropy_coef": [0.1],
    "temperature": [0.7],
}
# Of the estimator composed.
ARGUMENTS = {
    "advantage_clip_range": (-0.2, 0.3),
    "kl_in_baseline": False,
    "kl_of_truncated": False,
    "mean_over": "tokens",
    "std_leave1out": True,
    "epsilon_in_variance": True,
    "normalize_over": "tokens",
}
# Several updates for a rollout: everything is known before the first.
IN_PARTS = {"steps_per_generation": 3}


def draw_config(rng: random.Random) -> tuple[dict, RLOOConfig]:
    """Any combination that is not refused; a refusal must be a ValueError that gives a reason."""
    while True:
        options = {
            name: rng.choice(values) for name, values in SPACE.items() if rng.random() < 0.25
        }
        options.setdefault("beta", 0.0)
        options["estimator_kwargs"] = {
            name: value for name, value in ARGUMENTS.items() if rng.random() < 0.25
        }
        try:
            return options, make_policy_config(**options)
        except ValueError as error:
            assert any(name in str(error) for name in SPACE | ARGUMENTS), error


def draw_samples(rng: random.Random) -> list:
    """Groups of 2 to 4, some completions missing, cut off or of one token."""
    samples = make_samples(3, 4, seed=rng.randrange(1000))
    if rng.random() < 0.2:  # as many completions as tokens
        samples = [replace(s, token_ids=s.token_ids[:1], policy_logprobs=[0.0]) for s in samples]
    kept = [s for s in samples if s.key[1] < 2 or rng.random() < 0.7]
    return [
        replace(
            s,
            truncated=rng.random() < 0.3,
            policy_logprobs=[0.0] * len(s.token_ids),
            behavior_logprobs=[rng.gauss(-4.5, 0.5) for _ in s.token_ids],
        )
        for s in kept
    ]


def gradient_of(policy, samples, given, config) -> torch.Tensor:
    loss, _ = micro_batch_loss(policy, policy.batch(samples), given, terms_of(config), 12.0)
    assert loss.isfinite()
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in policy.parameters])
    policy.model.zero_grad()
    assert found.isfinite().all()
    return found


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-4 * other.norm() + 1e-6)


@pytest.mark.parametrize("seed", every_second(range(40)))
def test_credit_and_gradient_do_not_depend_on_how_they_are_computed(seed):
    rng = random.Random(seed)
    options, config = draw_config(rng)
    samples, policy = draw_samples(rng), make_policy_of(config)
    before = compute_advantages(
        samples, policy, terms_of(make_policy_config(**options, **IN_PARTS))
    )
    assert all(values.isfinite().all() for values in before.by_completion.values())
    # From the update's own pass, where that suffices, or as far as rewards go.
    given = compute_advantages(samples, policy, terms_of(config))
    first = gradient_of(policy, samples, given, config)
    assert is_close(first, gradient_of(policy, samples, before, config))
    after = given.after_first_step({})
    for key, values in before.by_completion.items():
        assert torch.allclose(after.by_completion[key].double(), values, atol=1e-4), options
        assert torch.allclose(after.old_logprobs[key], before.old_logprobs[key], atol=1e-5)
    # The second update, with ratios that are not 1: packed and padded.
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter.add_(torch.randn_like(parameter) * 0.01)
    packed = gradient_of(policy, samples, after, config)
    policy.packed = False
    assert is_close(gradient_of(policy, samples, after, config), packed)


@pytest.mark.slow
def test_micro_batches_below_a_group_add_up_to_the_whole():
    for seed in range(100, 112):
        rng = random.Random(seed)
        options, config = draw_config(rng)
        samples, policy = draw_samples(rng), make_policy_of(config)
        given = compute_advantages(
            samples, policy, terms_of(make_policy_config(**options, **IN_PARTS))
        )
        whole = gradient_of(policy, samples, given, config)
        parts = [gradient_of(policy, [s], given, config) for s in samples]
        assert is_close(sum(parts), whole), options
