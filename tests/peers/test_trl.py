"""TRL's own RLOOTrainer, and its GRPOTrainer, and ours on the same completions and weights."""

import math

import pytest

from support.async_trl import judge, make_rollout, perturb, theirs
from support.models import make_model

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # TRL and accelerate warn about each other
]

# As TRL's GRPOTrainer divides by default.
SCALED = {"std_level": "group"}


def ours(rollout, options, packing):
    def change(policy, seed):
        if seed == 3:
            perturb(policy.model, seed=3, scale=0.05)
        elif policy.reference.model is not None:
            perturb(policy.reference.model, seed=2)

    return judge(make_model("qwen3"), rollout, change, packing=packing, **options)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.05},
        {"beta": 0.0},
        {"beta": 0.5, "reward_clip_range": (-0.5, 1.5)},
        {"beta": 0.05, "normalize_advantages": True},
        {"beta": 0.05, "temperature": 0.7, "epsilon": 0.05, "epsilon_high": 0.1},
        {"beta": 0.05, "missing": True},
        {"beta": 0.5, "mask_truncated_completions": True, "cut": True},
    ],
    ids=str,
)
def test_advantages_loss_and_every_gradient_equal_trl(tmp_path, options, packing):
    options = dict(options)
    rollout = make_rollout(missing=options.pop("missing", False), cut=options.pop("cut", False))
    expected = theirs(tmp_path, rollout, options)
    compare(ours(rollout, {"preset": "trl", **options}, packing), expected)


@pytest.mark.parametrize(
    ("options", "preset"),
    [
        (
            {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
            {"preset": "grpo"},
        ),
        (
            {"loss_type": "grpo", "beta": 0.3, "delta": 1.3},
            {"preset": "grpo", "delta": 1.3, "use_bias_correction_kl": True},
        ),
        ({"loss_type": "grpo", "epsilon_high": 0.05}, {"preset": "grpo", "epsilon_high": 0.05}),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"preset": "dr_grpo"}),
        ({"loss_type": "grpo", "scale_rewards": "batch"}, {"preset": "grpo", "std_level": "batch"}),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {"preset": "grpo", "importance_sampling_level": "sequence_mean"},
        ),
        (
            {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
            {"preset": "dr_grpo", "importance_sampling_level": "sequence_mean", **SCALED},
        ),
    ],
    ids=str,
)
def test_grpo_and_its_relatives_equal_trl_s_grpo_trainer(tmp_path, options, preset):
    rollout = make_rollout()
    common = {"beta": 0.0, "epsilon": 0.1}
    # With one iteration it would take "old" to be "now".
    expected = theirs(tmp_path, rollout, {**common, **options, "num_iterations": 2}, "GRPO")
    beta = options.get("beta", 0.0)
    compare(ours(rollout, {**common, **preset, "beta": beta}, packing=True), expected)


def compare(result, expected) -> None:
    advantages, loss, gradients = result
    their_advantages, their_loss, their_gradients = expected
    assert advantages.abs().max() > 0.1
    assert (advantages - their_advantages).abs().max() < 1e-6 * max(1, advantages.abs().max())
    assert math.isclose(loss, their_loss, rel_tol=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        theirs_here = their_gradients[name]
        assert theirs_here.norm() > 0, name
        assert (gradient - theirs_here).norm() <= 1e-5 * theirs_here.norm(), name
