import os
import signal
import statistics

import pytest
from transformers import TrainerCallback

from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.reward_shaping import make_training_samples, shaped_rewards
from rloo.config.config import RLOOConfig
from rloo.rewards.running_norm import RunningNormReward
from rloo.types import Completion, Group, Prompt
from support.terms import rollout_of
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    weights,
    without_times,
)


def group(rewards, finishes=None, number=0) -> Group:
    finishes = finishes or ["stop"] * len(rewards)
    members = [Completion([5, 2], finish, [0.0, 0.0], [0.0, 0.0]) for finish in finishes]
    return Group(Prompt(number, [7], "x"), members, ["text"] * len(rewards), rewards)


def test_rewards_are_shaped_in_the_documented_order():
    config = RLOOConfig(
        reward_bias=-0.5, reward_scaling=10.0, missing_eos_penalty=3.0, reward_clip_range=(-6, 4)
    )
    groups = [group([1.0, 0.0, None, 1.0], ["stop", "length", "stop", "length"])]
    # (1 - 0.5) * 10 = 5, clipped to 4; -5 - 3 = -8, clipped to -6; 5 - 3 = 2.
    assert shaped_rewards(groups, config) == [4, -6, 2]
    assert [s.reward for s in make_training_samples(rollout_of(groups), config)] == [4, -6, 2]


def test_rewards_standardised_over_the_rollout():
    config = RLOOConfig(normalize_rewards="batch", advantage_epsilon=1e-6)
    values = [1.0, 3.0, 5.0, 9.0]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    samples = make_training_samples(
        rollout_of([group(values[:2]), group(values[2:], number=1)]), config
    )
    expected = [(v - mean) / (deviation + 1e-6) for v in values]
    assert [s.reward for s in samples] == pytest.approx(expected)


def test_rewards_standardised_by_earlier_rollouts_only():
    config = RLOOConfig(normalize_rewards="running")
    past = KLController(0.0)
    first = make_training_samples(rollout_of([group([1.0, 3.0])]), config, past)
    assert [s.reward for s in first] == [1, 3]
    for rewards in ([1.0, 3.0], [5.0, 9.0]):
        past.update_reward_stats(rewards, 0.9)
    values = [1.0, 3.0, 5.0, 9.0]
    assert (past.past.count, past.past.mean) == (4, statistics.fmean(values))
    expected = [(v - past.past.mean) / statistics.stdev(values) for v in (2.0, 4.0)]
    later = make_training_samples(rollout_of([group([2.0, 4.0])]), config, past)
    assert [s.reward for s in later] == pytest.approx(expected)


def test_the_running_baseline_follows_the_mean_reward_of_past_rollouts():
    config = RLOOConfig(
        mean_level="running", num_generations=1, estimator_kwargs={"running_decay": 0.5}
    )
    past = KLController(0.0)
    past.update_reward_stats([1.0, 3.0], 0.5)
    past.update_reward_stats([6.0], 0.5)
    assert past.decayed_mean == 0.5 * 2 + 0.5 * 6
    samples = make_training_samples(
        rollout_of([group([5.0]), group([2.0], number=1)]), config, past
    )
    assert [s.reward for s in samples] == [1, -2]


def test_the_kl_coefficient_moves_by_at_most_a_fifth_of_the_horizon():
    config = RLOOConfig(beta=0.1, kl_kwargs={"target": 0.5, "horizon": 100})
    far, near = KLController(0.1), KLController(0.1)
    far.update_kl(5.0, 50, config)
    near.update_kl(0.45, 50, config)
    assert far.beta == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert near.beta == pytest.approx(0.1 * (1 - 0.1 * 0.5))


def test_the_coefficient_is_logged_and_used(tmp_path):
    config = make_config(tmp_path, kl_kwargs={"target": 1e-4, "horizon": 12}, max_steps=3)
    make_trainer(config).train()
    rows = metrics_of(config)
    assert rows[0]["kl/coef"] == 0.05
    # The KL of step 1 is exactly 0: far below the target.
    assert rows[1]["kl/coef"] == pytest.approx(0.05 * 0.8)
    assert rows[2]["kl"] > 1e-4 and rows[2]["kl/coef"] != rows[1]["kl/coef"]


def test_groups_without_signal_are_replaced_by_those_of_further_prompts(tmp_path):
    flat = set(ROWS["prompt"][::2])

    def reward(prompts, completions, **_):
        values = count_words(completions)
        return [0.0 if p in flat else v for p, v in zip(prompts, values, strict=True)]

    used = []

    def run(**options):
        config = make_config(
            tmp_path / str(options), shuffle_dataset=False, max_steps=1, beta=0.0, **options
        )
        trainer = make_trainer(config, reward)
        trainer.monitor.completions = lambda step, groups: used.append(
            [g.prompt.id for g in groups]
        )
        trainer.train()
        return metrics_of(config)[0]

    row = run(dynamic_sample=True)
    # Prompts 0, 2, 4, ... have no signal: 0 1 2 | 3 4 | 5 gives 1, 3, 5.
    assert used[-1] == [1, 3, 5]
    assert row["dynamic_sampling/drawn_share"] == 2.0
    # What is shown is what the policy does on all prompts, not on the chosen ones.
    assert row["groups/signal"] == 0.5
    run(dynamic_sample=True, prompt_sampling_kwargs={"max_resample_times": 1})
    assert used[-1] == [1, 3, 0]
    run()
    assert used[-1] == [0, 1, 2]


def test_signal_is_what_the_update_would_see_and_every_draw_counts_in_what_rewards_log(tmp_path):
    """Clipping takes the signal of the first group away; a penalty could give it."""

    def reward(prompts, completions, log_metric, **_):
        log_metric("seen", float(len(set(prompts))))
        first = {"w0 w1 w2": [2.0, 3.0, 4.0, 5.0]}
        return [first.get(p, [0, 0, 1, 1])[i % 4] for i, p in enumerate(prompts)]

    config = make_config(
        tmp_path,
        shuffle_dataset=False,
        max_steps=1,
        beta=0.0,
        dynamic_sample=True,
        reward_clip_range=(0.0, 2.0),
    )
    trainer = make_trainer(config, reward)
    used = []
    trainer.monitor.completions = lambda step, groups: used.extend(g.prompt.id for g in groups)
    trainer.train()
    assert used == [1, 2, 3]
    # Three prompts in the first draw, one in the second.
    assert metrics_of(config)[0]["seen"] == pytest.approx((3 * 3 + 1 * 1) / 4)


@pytest.mark.parametrize("wrap", [lambda function: function, RunningNormReward])
def test_ctrl_c_between_two_draws_leaves_nothing_of_them(tmp_path, wrap):
    draws, trainers = [], []

    def reward(prompts, completions, **_):
        draws.append(trainers[-1].state.global_step)
        if stopping and draws[-2:] == [1, 1]:
            os.kill(os.getpid(), signal.SIGINT)
        # Of each draw the first group alone has signal.
        return [float(len(c)) if i < 4 else 0.5 for i, c in enumerate(completions)]

    def train(name, **more):
        config = make_config(tmp_path / name, max_steps=3, dynamic_sample=True)
        trainers.append(make_trainer(config, wrap(reward)))
        trainers[-1].train(**more)
        return trainers[-1], without_times(metrics_of(config))

    stopping = False
    whole, expected = train("whole")
    assert draws.count(1) == 3
    stopping = True
    with pytest.raises(KeyboardInterrupt):
        train("half")
    stopping = False
    resumed, rows = train("half", resume_from_checkpoint=True)
    assert equal(weights(whole), weights(resumed))
    assert rows == expected


@pytest.mark.parametrize(
    "options",
    [{"kl_kwargs": {"target": 0.05, "horizon": 20}}, {"normalize_rewards": "running"}],
    ids=str,
)
def test_what_was_learned_of_a_step_is_kept_when_a_callback_fails_after_it(tmp_path, options):
    whole = make_config(tmp_path / "whole", max_steps=4, **options)
    trainer = make_trainer(whole)
    trainer.train()

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise RuntimeError("disk is full")

    half = make_config(tmp_path / "half", max_steps=4, **options)
    with pytest.raises(RuntimeError, match="disk is full"):
        make_trainer(half, callbacks=[Fails()]).train()
    again = make_trainer(half)
    again.train(resume_from_checkpoint=True)
    assert equal(weights(trainer), weights(again))


def test_a_reference_under_an_adapter_cannot_follow(tmp_path):
    from peft import LoraConfig

    config = make_config(tmp_path, sync_ref_model=True)
    with pytest.raises(ValueError, match="must not move"):
        make_trainer(config, peft_config=LoraConfig(target_modules=["q_proj"]))


def test_the_reference_moves_towards_the_policy(tmp_path):
    config = make_config(
        tmp_path,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.25,
        max_steps=2,
    )
    trainer = make_trainer(config)
    before = weights(trainer)
    trainer.train()
    after = weights(trainer)
    for name, moved in trainer.policy.reference.model.named_parameters():
        expected = 0.75 * before[name] + 0.25 * after[name]
        assert (moved - expected).abs().max() < 1e-6
    assert not equal(before, after)


def test_a_reward_can_change_with_the_step(tmp_path):
    steps = []

    def reward(completions, trainer_state, **_):
        steps.append(trainer_state.global_step)
        return [float(trainer_state.global_step) for _ in completions]

    config = make_config(tmp_path, max_steps=3, beta=0.0)
    make_trainer(config, reward).train()
    assert steps == [0, 1, 2]
    assert [row["reward"] for row in metrics_of(config)] == [0, 1, 2]
