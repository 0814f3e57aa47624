"""AReaL's own actor and loss, and ours, on the same log-probs and rewards."""

import pytest
import torch

from support.fixed_logprobs import Result, Rollout, assert_equal, make_rollout, ours, pad

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("default"),  # AReaL's imports warn
]

# Its arithmetic is float32 throughout, over returns of up to 20.
TOLERANCE = 2e-6
SIZES = ([2] * 8, [4] * 4, [6] * 3)


def leave_one_out(size: int) -> dict:
    return {"mean_level": "group", "mean_leave1out": True, "std_level": None, "group_size": size}


def shipped(size: int) -> dict:
    """The objective of its examples/math/gsm8k_rloo.yaml."""
    from areal.api.cli_args import NormConfig, RejectionSamplingConfig

    return {
        "eps_clip": 0.4,
        "reward_bias": -0.5,
        "reward_scaling": 10.0,
        "reward_norm": NormConfig(**leave_one_out(size)),
        "adv_norm": NormConfig(mean_level="batch", std_level="batch"),
        "kl_ctl": 0.0,
        "use_decoupled_loss": True,
        "rejection_sampling": RejectionSamplingConfig(
            level="token", action="mask", metric="ratio", upper=5.0
        ),
    }


def documented(size: int) -> dict:
    """The objective of its RLOO page; the rest at its defaults, log-probs the trainer's own."""
    from areal.api.cli_args import NormConfig

    return {"adv_norm": NormConfig(**leave_one_out(size)), "recompute_logprob": True}


def aligned(rows: list[torch.Tensor]) -> torch.Tensor:
    """(N, 1 + longest): after a prompt of one token, each value where its token is predicted."""
    return torch.nn.functional.pad(pad(rows), (0, 1)).float()


def their_inputs(rollout: Rollout) -> dict[str, torch.Tensor]:
    mask = aligned([torch.ones_like(values) for values in rollout.now])
    return {
        "input_ids": torch.ones(mask.shape, dtype=torch.long),
        "attention_mask": (torch.arange(mask.shape[1]) < 1 + mask.sum(1, keepdim=True)).long(),
        "rewards": torch.tensor(rollout.rewards),
        # What its sampler returns lies where the tokens are.
        "loss_mask": mask.roll(1, dims=-1),
        "logprobs": aligned(rollout.sampler).roll(1, dims=-1),
        "prox_logp": aligned(rollout.old),
        "ref_logp": aligned(rollout.reference),
    }


def theirs(rollout: Rollout, settings: dict) -> Result:
    from areal.api.cli_args import PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor, grpo_loss_fn

    config = PPOActorConfig(experiment_name="x", trial_name="x", path="x", **settings)
    data = PPOActor(config, engine=None)._compute_advantages(their_inputs(rollout))
    now = aligned(rollout.now).requires_grad_()
    loss = grpo_loss_fn(
        now,
        torch.zeros_like(now),
        data,
        eps_clip=config.eps_clip,
        eps_clip_higher=config.eps_clip_higher,
        c_clip=config.c_clip,
        rejection_sampling=config.rejection_sampling,
        importance_sampling_level=config.importance_sampling_level,
        prox_logp_method=config.prox_logp_method,
        use_decoupled_loss=config.use_decoupled_loss,
    )
    loss.backward()
    advantages = data["advantages"] * data["loss_mask"]
    return Result(advantages[:, :-1], loss.item(), now.grad[:, :-1])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_preset_areal_is_the_recipe_that_it_ships(sizes):
    rollout = make_rollout(sizes, seed=1)
    assert any(abs(10 * (reward - 0.5)) > 20 for reward in rollout.rewards)
    expected = theirs(rollout, shipped(sizes[0]))
    assert_equal(ours(rollout, preset="areal"), expected, TOLERANCE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_preset_areal_with_a_kl_penalty_takes_it_per_token_after_the_baseline(sizes):
    # Without the decoupled objective: with it, AReaL's KL is the sampler's.
    changed = {"kl_ctl": 0.3, "use_decoupled_loss": False, "recompute_logprob": True}
    rollout = make_rollout(sizes, seed=2)
    settings = {**shipped(sizes[0]), **changed, "rejection_sampling": None}
    found = ours(rollout, preset="areal", beta=0.3, rollout_importance_sampling_mode=None)
    assert_equal(found, theirs(rollout, settings), TOLERANCE)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", [{}, {"beta": 0.7}, {"delta": 1.5, "epsilon": 0.3}], ids=str)
def test_preset_areal_docs_is_the_recipe_of_its_page(sizes, options):
    names = {"beta": "kl_ctl", "delta": "c_clip", "epsilon": "eps_clip"}
    rollout = make_rollout(sizes, seed=3)
    settings = documented(sizes[0]) | {names[name]: value for name, value in options.items()}
    found = ours(rollout, preset="areal_docs", **options)
    assert_equal(found, theirs(rollout, settings), TOLERANCE)


def test_its_ratio_of_a_sequence_is_the_geometric_mean_at_each_token():
    rollout = make_rollout([4] * 4, seed=4)
    settings = shipped(4) | {"importance_sampling_level": "sequence", "adv_norm": None}
    # Tokens that it drops leave its mean of the ratios, too, which is not part of ours.
    settings["rejection_sampling"].action = "clamp"
    form = {"normalize_advantages": False}
    form |= {"importance_sampling_level": "sequence_mean", "kl_placement": "reward"}
    form |= {"rollout_importance_sampling_mode": "token_truncate"}
    assert_equal(ours(rollout, preset="areal", **form), theirs(rollout, settings), TOLERANCE)


def test_the_recipe_of_its_page_leaves_out_one_token_in_both():
    rows = [torch.zeros(1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    rollout = Rollout([0, 0], [1.0, 0.0], rows, rows, rows, rows)
    expected = torch.tensor([[1.0, 0.0, 0.0], [-1 / 3, -1 / 3, -1 / 3]])
    assert (theirs(rollout, documented(2)).advantages - expected).abs().max() < 1e-6
    assert (ours(rollout, preset="areal_docs").advantages - expected).abs().max() < 1e-6
    # One answer would be this.
    right = torch.tensor([[1.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    assert (ours(rollout, preset="verl").advantages - right).abs().max() < 1e-6


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_its_own_bound_included(estimator):
    from areal.utils.data import KLEstimator

    from rloo.algorithm.kl_estimate import kl_estimate

    policy = torch.linspace(-15, 15, 31)
    values = kl_estimate(policy, torch.zeros(31), estimator=estimator, clip=10.0)
    expected = KLEstimator(estimator)(policy, torch.zeros(31))
    assert expected.abs().max() == 10.0
    assert (values - expected).abs().max() < 1e-5
