"""ms-swift's own argument defaults, advantages and loss, and ours, on the same log-probs."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

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
    pytest.mark.filterwarnings("default"),  # ms-swift's imports warn
]

# Of several sizes: its metrics, not its advantages, want a multiple of the largest in all.
SIZES = ([2] * 8, [4] * 4, [6] * 3, [2, 3, 6, 4, 3])


def their_arguments(**options) -> SimpleNamespace:
    """What `swift rlhf --rlhf_type grpo` with `options` makes of its arguments."""
    from swift.arguments.rlhf_args import RLHFArguments

    values = {}
    for field in dataclasses.fields(RLHFArguments):
        made = field.default_factory is not dataclasses.MISSING
        values[field.name] = field.default_factory() if made else field.default
    options = {"max_completion_length": MAX_LENGTH, **options}
    arguments = SimpleNamespace(**{**values, "rlhf_type": "grpo", **options})
    # The parts of its __post_init__ that set options of the objective, in its order.
    RLHFArguments._init_grpo(arguments)
    RLHFArguments._set_default(arguments)
    return arguments


def make_trainer(sizes: set[int], now: torch.Tensor, arguments: SimpleNamespace):
    """A GRPOTrainer whose model is `now`: only what its objective reads is there."""
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    trainer.args = arguments
    trainer._prepare_algorithm_params()
    trainer.beta = arguments.beta
    trainer.max_completion_length = arguments.max_completion_length
    trainer.num_generations = max(sizes)
    trainer.dynamic_num_samples = len(sizes) > 1
    trainer.reward_weights = torch.ones(1, dtype=now.dtype)
    trainer.reward_func_names = ["reward"]
    trainer.compute_entropy = trainer.disable_rollout_importance_sampling = False
    trainer._has_teacher = False
    trainer.chord_sft_iterator = None
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(
        gather_for_metrics=lambda x: x, num_processes=1, device=torch.device("cpu")
    )
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = {"rewards": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (now, None)
    return trainer


def theirs(rollout: Rollout, **options) -> Result:
    from swift.rl_core.advantage import expand_advantage_to_per_token
    from swift.rl_core.data import GRPOBatch

    sizes = {rollout.group.count(number) for number in rollout.group}
    # Its code for groups of several sizes knows float32 only.
    dtype = torch.float64 if len(sizes) == 1 else torch.float32
    now, old, reference, sampler = (
        pad(rows).to(dtype)
        for rows in (rollout.now, rollout.old, rollout.reference, rollout.sampler)
    )
    now.requires_grad_()
    mask = rollout.mask
    trainer = make_trainer(sizes, now, their_arguments(**options))
    batch = GRPOBatch(
        completion_mask=mask,
        truncated_mask=torch.zeros(len(mask), dtype=torch.bool),
        seq_lengths=mask.sum(1),
        old_per_token_logps=old,
        ref_per_token_logps=reference,
        rollout_per_token_logps=sampler,
    )
    samples = [
        SimpleNamespace(prompt_id=f"prompt {number}", request_id=f"request {row}")
        for row, number in enumerate(rollout.group)
    ]
    rewards = torch.tensor(rollout.rewards, dtype=dtype)[:, None]
    values = trainer._compute_advantages(samples, rewards, [{"grpo_batch": batch}])
    batch.advantages = expand_advantage_to_per_token(values, mask)
    loss, _ = trainer._compute_loss_and_metrics(None, {}, batch)
    loss.backward()
    return Result(batch.advantages * mask, loss.item(), now.grad)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("given", [{}, {"beta": 0.7}, {"beta": 0.0}], ids=str)
def test_preset_ms_swift_is_its_rloo_as_its_arguments_stand(given, sizes):
    rollout = make_rollout(sizes, seed=1)
    expected = theirs(rollout, advantage_estimator="rloo", **given)
    assert_equal(ours(rollout, preset="ms_swift", **given), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_preset_grpo_is_its_grpo_but_for_its_bound_of_the_kl(sizes):
    rollout = make_rollout(sizes, seed=3)
    expected = theirs(rollout, advantage_estimator="grpo")
    assert_equal(ours(rollout, preset="grpo", kl_kwargs={"clip": 10.0}), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_preset_dr_grpo_is_its_grpo_without_scale_kl_and_length(sizes):
    rollout = make_rollout(sizes, seed=4)
    form = {"scale_rewards": "none", "loss_type": "dr_grpo", "beta": 0.0}
    assert_equal(ours(rollout, preset="dr_grpo"), theirs(rollout, **form))


@pytest.mark.parametrize(
    "options",
    [
        {"delta": 1.5},
        {"epsilon": 3e-4, "epsilon_high": 4e-4},
        {"rollout_importance_sampling_mode": "token_truncate"},
        {
            "rollout_importance_sampling_mode": "token_mask",
            "rollout_importance_sampling_threshold": 3.0,
        },
    ],
    ids=str,
)
def test_options_of_the_same_name_do_the_same(options):
    rollout = make_rollout([4, 4, 4, 4], seed=5)
    expected = theirs(rollout, advantage_estimator="rloo", **options)
    plain = theirs(rollout, advantage_estimator="rloo")
    assert (expected.gradient - plain.gradient).abs().max() > 1e-3
    assert_equal(ours(rollout, preset="ms_swift", **options), expected)


@pytest.mark.parametrize(
    ("kind", "aggregation"),
    [("grpo", "sequence_token_mean"), ("bnpo", "token_mean"), ("dr_grpo", "constant")],
)
@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_gspo_is_the_geometric_mean_of_ratios(level, kind, aggregation):
    rollout = make_rollout([4, 4, 4, 4], seed=6)
    form = {"importance_sampling_level": level, "loss_type": kind}
    expected = theirs(rollout, advantage_estimator="rloo", **form)
    found = ours(
        rollout,
        preset="ms_swift",
        importance_sampling_level="sequence_mean",
        loss_aggregation=aggregation,
    )
    assert_equal(found, expected)
