"""verl's own functions and ours on the same log-probs and rewards."""

import math

import numpy as np
import pytest
import torch

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.group_baselines import length_weighted
from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.token_baselines import optimal_token
from rloo.config.config import RLOOConfig
from support.fixed_logprobs import (
    MAX_LENGTH,
    Result,
    Rollout,
    assert_equal,
    make_rollout,
    ours,
    pad,
)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # verl warns of engines that are not installed
]

RAGGED = ([2, 3, 6, 4, 5], [4, 4, 4])


def their_advantages(rollout: Rollout, estimator: str, beta: float, **options) -> torch.Tensor:
    """With the KL penalty in the reward, as verl's trainer puts the two together."""
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

    mask = rollout.mask
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[torch.arange(len(mask)), mask.sum(1) - 1] = torch.tensor(rollout.rewards).double()
    tensors = {
        "response_mask": mask.long(),
        "token_level_scores": scores,
        "old_log_probs": pad(rollout.old),
        "ref_log_prob": pad(rollout.reference),
    }
    names = np.array([f"prompt {number}" for number in rollout.group], dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": names})
    data, _ = apply_kl_penalty(data, FixedKLController(beta), kl_penalty="kl")
    data = compute_advantage(data, estimator, config=AlgoConfig(), **options)
    return data.batch["advantages"]


def theirs(
    rollout: Rollout,
    estimator: str,
    *,
    beta: float = 0.0,
    kl_loss: float = 0.0,
    aggregation: str = "token-mean",
    loss: str = "vanilla",
    weights: torch.Tensor | None = None,
    **options,
) -> Result:
    """`beta` weighs the KL in the reward, `kl_loss` that in the loss."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.workers.config import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True)
    config.global_batch_info["loss_scale_factor"] = MAX_LENGTH
    advantages = their_advantages(rollout, estimator, beta, **options)
    now, mask = pad(rollout.now).requires_grad_(), rollout.mask
    value, _ = get_policy_loss_fn(loss)(
        pad(rollout.old), now, advantages, mask, aggregation, config, weights
    )
    if kl_loss:
        penalty = kl_penalty(now, pad(rollout.reference), "low_var_kl")
        value = value + kl_loss * agg_loss(penalty, mask, aggregation, **config.global_batch_info)
    value.backward()
    return Result(advantages, value.item(), now.grad)


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
@pytest.mark.parametrize("beta", [0.001, 0.7])
def test_preset_verl_is_its_rloo(estimator, beta, sizes):
    rollout = make_rollout(sizes, seed=1)
    expected = theirs(rollout, estimator, beta=beta)
    assert_equal(ours(rollout, preset="verl", beta=beta), expected)


@pytest.mark.parametrize("preset", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("sizes", RAGGED, ids=str)
@pytest.mark.parametrize("beta", [0.001, 0.7])
def test_presets_of_reinforce_plus_plus_are_its_estimators(preset, sizes, beta):
    estimator = preset.replace("reinforce_pp", "reinforce_plus_plus")
    rollout = make_rollout(sizes, seed=2)
    expected = theirs(rollout, estimator, beta=beta)
    assert_equal(ours(rollout, preset=preset, beta=beta), expected)


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_preset_grpo_with_its_epsilon_and_bounds_is_its_grpo(sizes):
    rollout = make_rollout(sizes, seed=3)
    expected = theirs(rollout, "grpo", kl_loss=0.04, aggregation="seq-mean-token-mean")
    changed = {"advantage_epsilon": 1e-6, "delta": 3.0, "kl_kwargs": {"clip": 10.0}}
    assert_equal(ours(rollout, preset="grpo", **changed), expected)


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_preset_dr_grpo_with_dual_clip_is_its_form_of_dr_grpo(sizes):
    rollout = make_rollout(sizes, seed=4)
    form = {"norm_adv_by_std_in_grpo": False, "aggregation": "seq-mean-token-sum-norm"}
    assert_equal(ours(rollout, preset="dr_grpo", delta=3.0), theirs(rollout, "grpo", **form))


def test_ratios_of_geometric_means_are_its_gspo():
    rollout = make_rollout([4, 4, 4, 4], seed=5)
    expected = theirs(rollout, "rloo", aggregation="seq-mean-token-mean", loss="gspo")
    found = ours(
        rollout,
        beta=0.0,
        importance_sampling_level="sequence_mean",
        epsilon=0.2,
        loss_aggregation="sequence_token_mean",
    )
    assert_equal(found, expected)


def test_preset_paper_has_the_gradient_of_its_reinforce_loss():
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce
    from verl.workers.config import ActorConfig

    rollout = make_rollout([2, 3, 6, 4, 5], seed=6)
    # On the policy that sampled them: nothing is clipped, and every ratio is 1.
    rollout = Rollout(**{**vars(rollout), "now": rollout.old})
    advantages = their_advantages(rollout, "rloo", beta=0.05)
    now = pad(rollout.now).requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True)
    value, _ = compute_policy_loss_reinforce(
        pad(rollout.sampler), now, advantages, rollout.mask, "seq-mean-token-sum", config
    )
    value.backward()
    found = ours(rollout, preset="paper")
    # The value of their loss, A log pi, means nothing; ours is minus the advantages' mean.
    assert_equal(found, Result(advantages, -advantages[:, 0].mean().item(), now.grad))


@pytest.mark.parametrize(
    ("mode", "level", "threshold", "bounds"),
    [
        ("token_truncate", "token", 2.0, {}),
        ("sequence_truncate", "sequence", 2.0, {}),
        ("token_mask", "token", "0.5_5.0", {"min": 0.5, "threshold": 5.0}),
        ("sequence_mask", "sequence", "0.5_5.0", {"min": 0.5, "threshold": 5.0}),
    ],
)
def test_weights_against_the_sampler_are_its_rollout_correction(mode, level, threshold, bounds):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    rollout = make_rollout([2, 3, 6, 4, 5], seed=7)
    weights, _ = compute_rollout_correction_weights(
        pad(rollout.old) - pad(rollout.sampler), rollout.mask, level, threshold
    )
    assert (weights > 0).any() and (weights == 0).any()
    expected = theirs(rollout, "rloo", beta=0.001, weights=weights)
    prefix = "rollout_importance_sampling_"
    options = {f"{prefix}{name}": value for name, value in bounds.items()}
    assert_equal(ours(rollout, preset="verl", **{f"{prefix}mode": mode}, **options), expected)


@pytest.mark.parametrize("ours_name", ["k1", "k2", "k3"])
def test_kl_estimates_are_its_own_in_value_and_gradient(ours_name):
    from verl.trainer.ppo.core_algos import kl_penalty

    from rloo.algorithm.kl_estimate import kl_estimate

    rollout = make_rollout([4, 4, 4], seed=8)
    reference = torch.cat(rollout.reference)
    gradients = []
    for estimate in (
        lambda policy: kl_penalty(policy, reference, ours_name),
        lambda policy: kl_estimate(policy, reference, estimator=ours_name),
    ):
        policy = torch.cat(rollout.now).requires_grad_()
        values = estimate(policy)
        values.sum().backward()
        gradients.append((values.detach(), policy.grad))
    (their_values, their_gradient), (values, gradient) = gradients
    assert (values - their_values).abs().max() < 1e-6
    assert (gradient - their_gradient).abs().max() < 1e-6


def test_the_adaptive_kl_coefficient_is_its_controllers():
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    config = RLOOConfig(beta=0.1, kl_kwargs={"target": 0.05, "horizon": 1000})
    controller, past = AdaptiveKLController(0.1, 0.05, 1000), KLController(0.1)
    seen = []
    for kl in (0.2, 0.055, 0.04, 0.0):
        controller.update(kl, 64)
        past.update_kl(kl, 64, config)
        seen.append(past.beta)
        assert math.isclose(past.beta, controller.value, rel_tol=1e-9)
    assert len(set(seen)) == 4


@pytest.mark.parametrize("lengths", RAGGED)
def test_baselines_with_the_completion_itself_are_its_opo_and_optimal_token(lengths):
    """Two groups, of these lengths and in reverse."""
    from verl.trainer.ppo.core_algos import (
        compute_opo_outcome_advantage,
        compute_optimal_token_baseline_advantage,
    )

    lengths = [*lengths, *reversed(lengths)]
    torch.manual_seed(len(lengths))
    size, longest = len(lengths), max(lengths)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).double()
    scores = torch.zeros(size, longest, dtype=torch.float64)
    rewards = torch.randn(size, dtype=torch.float64)
    scores[torch.arange(size), mask.sum(1).long() - 1] = rewards
    every = (2 * torch.randn(size, longest, 7, dtype=torch.float64)).log_softmax(-1)
    logprobs, collision = every[..., 0], every.exp().square().sum(-1)
    group_N = torch.arange(2).repeat_interleave(size // 2)
    returns = EstimatorInput(
        rewards,
        torch.zeros(sum(lengths), dtype=torch.float64),
        torch.arange(size).repeat_interleave(torch.tensor(lengths)),
        group_N,
        torch.zeros(size, dtype=torch.bool),
        (1 - 2 * logprobs.exp() + collision)[mask.bool()],
    )
    theirs, _ = compute_optimal_token_baseline_advantage(
        scores, mask, group_N.numpy(), logprobs, collision
    )
    found = optimal_token(returns, leave1out=False)
    assert (found - theirs[mask.bool()]).abs().max() < 1e-6
    theirs, _ = compute_opo_outcome_advantage(scores, mask, group_N.numpy())
    found = length_weighted(returns, leave1out=False)[returns.sequence_T]
    assert (found - theirs[mask.bool()]).abs().max() < 1e-6
