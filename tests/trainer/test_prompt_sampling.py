"""Runs whose prompts are drawn by the deviation of their rewards."""

import shutil
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from rloo.algorithm.reward_scoring import begun_prompts
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.state import minibatches
from rloo.data.token_features import token_features
from rloo.model.probe_state import NUM_FEATURES, read_prompts
from rloo.trainer.resume import changed_options
from rloo.types import Completion, Episode, Prompt
from support.models import make_model
from support.training import (
    ROWS,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    train_with_failure,
    weights,
)

VARIANCE = {"prompt_sampling": "variance"}
LEVELS = ROWS.add_column("level", [n % 3 for n in range(12)])
REWARD = "length(target_min=3, target_max=5)"
BATCH = """
from rloo.algorithm.estimators import batch_scope

@batch_scope
def centred(returns):
    return returns.return_N - returns.return_N.mean()
"""


def by_level(completions, level, **_):
    """Rows of level 0 never pay, those of level 1 always do."""
    return [
        (0.0, 1.0, float(len(text) % 2))[row] for text, row in zip(completions, level, strict=True)
    ]


def for_long_prompts(prompts, completions, **_):
    """Only prompts of more than four words pay, by the length of the completion."""
    pairs = zip(prompts, completions, strict=True)
    return [len(text) * float(len(prompt.split()) > 4) for prompt, text in pairs]


def by_place(prompts, completions, **_):
    """Every second completion of a prompt pays, by the length of the prompt, whatever is
    sampled."""
    return [place % 2 * float(len(prompt.split())) ** 2 for place, prompt in enumerate(prompts)]


def test_a_stream_an_unknown_column_and_an_estimator_of_the_rollout_are_refused(tmp_path):
    config = make_config(tmp_path, **VARIANCE)
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    with pytest.raises(ValueError, match="prompt_sampling is variance and the dataset is a stream"):
        make_trainer(config, rows=stream)
    other = make_config(tmp_path, **VARIANCE, prompt_sampling_kwargs={"column": "lvl"})
    with pytest.raises(ValueError, match=r"column is lvl and .* its columns are prompt, level"):
        make_trainer(other, rows=LEVELS)
    (tmp_path / "mine.py").write_text(BATCH)
    own = make_config(tmp_path, **VARIANCE, estimator=f"{tmp_path}/mine.py:centred")
    with pytest.raises(ValueError, match=r"mine.py:centred and prompt_sampling is variance, whose"):
        make_trainer(own)


def test_a_load_balancing_loss_is_refused(tmp_path):
    config = make_config(tmp_path, **VARIANCE, router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.1 and prompt_sampling is var"):
        make_trainer(config, model=make_model("qwen3_moe"))


def test_the_rewards_of_a_rollout_count_from_the_next_one_on(tmp_path):
    config = make_config(
        tmp_path, **VARIANCE, prompt_sampling_kwargs={"column": "level"}, num_prompts=12,
        reward_clip_range=[0.0, 0.5], reward_scaling=3.0,
    )  # fmt: skip
    parts, _ = make_trainer(config, by_level, LEVELS).make_parts()
    first, second = parts.rollouts.next(), parts.rollouts.next()
    assert {group.prompt.weight for group in first.groups} == {1.0}
    assert first.metrics["prompt_sampling/effective_share"] == 1.0
    assert first.metrics["prompt_sampling/uniform_reward"] == first.metrics["reward"]
    levels = [group.prompt.columns["level"] for group in second.groups]
    assert levels.count(2) > 6
    weight = {g.prompt.columns["level"]: g.prompt.weight for g in second.groups}
    assert weight[2] < 1 < max(weight.values()) <= 4
    assert second.epoch == 2.0
    assert second.metrics["prompt_sampling/effective_share"] < 1.0
    state = second.position["prompts"]
    assert state["drawn"] == 24 and "estimate" in state


def test_weighted_metrics_are_means_over_the_weights(tmp_path):
    config = make_config(
        tmp_path, **VARIANCE, prompt_sampling_kwargs={"column": "level"}, num_prompts=8
    )
    parts, _ = make_trainer(config, by_level, LEVELS).make_parts()
    for _ in range(2):
        rollout = parts.rollouts.next()
    rows = [(g.prompt.weight, g.rewards) for g in rollout.groups]
    total = sum(w for w, _ in rows)
    share = total**2 / (8 * sum(w * w for w, _ in rows))
    reward = sum(w * sum(r) / 4 for w, r in rows) / total
    signal = sum(w * (max(r) != min(r)) for w, r in rows) / total
    metrics = [
        rollout.metrics[f"prompt_sampling/{name}"]
        for name in ("effective_share", "uniform_reward", "uniform_signal")
    ]
    assert metrics == pytest.approx([share, reward, signal], rel=1e-12)
    assert share < 0.999


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2},
        {"steps_per_generation": 3, "num_prompts": 1, "gradient_accumulation_steps": 1},
    ],
    ids=["one step", "several passes", "several parts"],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, options):
    steps = 14 if options else 8
    kwargs = {"half_life": 3.0}
    options = {**VARIANCE, "max_steps": steps, "prompt_sampling_kwargs": kwargs, **options}
    whole = make_trainer(make_config(tmp_path / "whole", **options), for_long_prompts)
    whole.train()
    config = make_config(tmp_path / "parts", **options, save_strategy="steps", save_steps=3)
    found = [row.get("prompt_sampling/effective_share", 1.0) for row in metrics_of(whole.args)]
    assert found[0] == 1.0 and min(found) < 0.999
    resumed = train_with_failure(config, for_long_prompts, ROWS)
    assert equal(weights(whole), weights(resumed))


def test_a_resumed_run_names_a_changed_setting(tmp_path):
    before = make_config(tmp_path, **VARIANCE).to_dict()
    now = make_config(tmp_path, **VARIANCE, prompt_sampling_kwargs={"floor": 0.5})
    assert changed_options(before, now) == ["prompt_sampling_kwargs.floor 0.25 -> 0.5"]


def test_the_prompt_of_an_episode_has_the_weight_of_its_draw():
    """Also where an environment extended it in a process that does not know the weight."""
    begun = Prompt(3, [7, 8], "longer")
    told = Episode(None, 1, 0, 0, 0.0, prompt=begun)
    completion = Completion([5], "stop", [0.0], [0.0], episode=told)
    drawn = Prompt(3, [7], "x", weight=2.5, num_completions=6)
    (found,) = begun_prompts([drawn], [[completion]])
    assert (found.token_ids, found.weight, found.num_completions) == ([7, 8], 2.5, 6)


TEXT, POLICY = ({"prompt_sampling_kwargs": {"probe": name}} for name in ("text", "policy"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"packing": False}])
def test_the_probe_reads_the_hidden_state_at_the_end_of_each_prompt(tmp_path, options):
    trainer = make_trainer(make_config(tmp_path, **VARIANCE, **POLICY, **options))
    source, policy = trainer.make_parts()[0].rollouts.prompts, trainer.policy
    prompts = [source.token_ids(number) for number in range(12)]
    found = read_prompts(policy, prompts, seed=3)
    other = read_prompts(policy, prompts[::-1], seed=3)[::-1]
    assert found == pytest.approx(other, abs=1e-5)
    with torch.no_grad():
        states = torch.stack(
            [policy.model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in prompts]
        ).double()
    states = states / states.square().mean(1, keepdim=True).sqrt()
    # Signs of independent bits: distances are kept on average, and sums of products are linear.
    assert found.shape == (12, NUM_FEATURES)
    weights = np.linalg.lstsq(states.numpy(), found, rcond=None)[0]
    assert states.numpy() @ weights == pytest.approx(found, abs=1e-4)
    if states.shape[1] < 12:
        signs = weights * states.shape[1] ** 0.5
        assert np.abs(signs) == pytest.approx(np.ones_like(signs), abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("probe", [TEXT, POLICY], ids=["text", "policy"])
def test_a_probe_predicts_rewards_and_a_resumed_run_ends_with_the_same_bits(tmp_path, probe):
    rows = Dataset.from_dict({"prompt": [f"w{n % 7} w{2 + n} w{n % 2}" for n in range(60)]})
    options = {
        **VARIANCE,
        **probe,
        "max_steps": 9,
        "save_steps": 4,
        "num_prompts": 8,
        "learning_rate": 1e-3,
    }

    def by_last_word(prompts, completions, **_):
        pairs = zip(prompts, completions, strict=True)
        return [float(len(text) % 2) * prompt.endswith("w1") for prompt, text in pairs]

    whole = make_trainer(make_config(tmp_path, **options), by_last_word, rows)
    whole.train()
    found = metrics_of(whole.args)
    assert (found[-1].get("time/probe", 0.0) > 0) == (probe is POLICY)
    assert found[-1]["prompt_sampling/probe_explained"] > 0.2
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    shutil.rmtree(tmp_path / "run" / "checkpoint-9", ignore_errors=True)
    resumed = make_trainer(make_config(tmp_path, **options), by_last_word, rows)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(whole), weights(resumed))


SIZED = {"prompt_sampling_kwargs": {"max_generations": 7, "column": "level", "floor": 1.0}}


def test_completions_go_to_the_prompts_that_pay(tmp_path):
    """In each optimizer step as many as without; weights keep each prompt's part of the loss."""
    config = make_config(
        tmp_path, **VARIANCE, **SIZED, steps_per_generation=2, gradient_accumulation_steps=1,
    )  # fmt: skip
    parts, _ = make_trainer(config, by_level, LEVELS).make_parts()
    first, second = parts.rollouts.next(), parts.rollouts.next()
    assert {len(group.completions) for group in first.groups} == {4}
    assert first.metrics["prompt_sampling/largest_group"] == 4.0
    sizes = [len(group.completions) for group in second.groups]
    assert [sum(sizes[:3]), sum(sizes[3:])] == [12, 12]
    assert second.metrics["prompt_sampling/largest_group"] == max(sizes) > 4
    mixed = [n for n, group in enumerate(second.groups) if group.prompt.columns["level"] == 2]
    flat = [n for n, group in enumerate(second.groups) if group.prompt.columns["level"] != 2]
    assert min(sizes[n] for n in mixed) >= max(sizes[n] for n in flat)
    samples = make_training_samples(second, config)
    for number, size in enumerate(sizes):
        own = [sample.weight for sample in samples if sample.key[0] == number]
        assert own == [4 / size] * size and second.groups[number].prompt.weight == 1.0
    steps = [{s.key[0] for s in step} for step in minibatches(samples, parts.batches)]
    assert steps == [{0, 1, 2}, {3, 4, 5}]


PILOT = {"pilot": 2, **SIZED["prompt_sampling_kwargs"]}


def test_a_pilot_decides_on_the_other_completions(tmp_path):
    """From the first rollout on, in each optimizer step as many as without."""
    seen = []

    def by_word(prompts, completions, completion_ids, log_metric, log_extra, **_):
        seen.append([len([*some]) for _, some in groupby(prompts)])
        log_metric("length", sum(map(len, completion_ids)) / len(completions))
        log_extra("call", [len(seen)] * len(completions))
        return [float(ids[0] % 2) for ids in completion_ids]

    config = make_config(
        tmp_path, **VARIANCE, prompt_sampling_kwargs=PILOT, num_prompts=6, num_generations=6
    )
    parts, _ = make_trainer(config, by_word, LEVELS).make_parts()
    rollout = parts.rollouts.next()
    first, others = seen
    assert first == [2] * 6 and sum(others) == 6 * 4 and max(others) <= 5 > min(others) >= 1
    groups = rollout.groups
    assert [len(group.completions) for group in groups] == [2 + n for n in others]
    assert [group.extras["call"] for group in groups] == [[1] * 2 + [2] * n for n in others]
    assert rollout.metrics["length"] == pytest.approx(
        np.mean([len(c.token_ids) for group in groups for c in group.completions])
    )
    differ = [len({*group.rewards[:2]}) == 2 for group in groups]
    assert any(differ) and not all(differ)
    mixed, flat = (
        [n for n, d in zip(others, differ, strict=True) if d is k] for k in (True, False)
    )
    assert min(mixed) >= max(flat)
    # No completion of the second stage repeats one of the pilot.
    ids = [tuple(c.token_ids) for group in groups for c in group.completions]
    assert len({*ids}) == len(ids)
    weights = {sample.key: sample.weight for sample in make_training_samples(rollout, config)}
    for number, group in enumerate(groups):
        own = [weights[number, place] for place in range(len(group.completions))]
        assert own == [1.0] * 2 + [4 / others[number]] * others[number]


def test_a_pilot_needs_completions_in_two_calls(tmp_path):
    config = make_config(tmp_path, **VARIANCE, prompt_sampling_kwargs=PILOT)

    def rollouts(prompts, trainer):
        raise AssertionError

    with pytest.raises(ValueError, match="pilot is 2 and the run has a rollout_func, which makes"):
        make_trainer(config, by_level, LEVELS, rollout_func=rollouts)

    class Counter:
        def reset(self, **_):
            pass

        def count(self) -> int:
            """Count."""
            return 1

    messages = LEVELS.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    with pytest.raises(ValueError, match="pilot is 2 and the run has environments, whose first st"):
        make_trainer(config, by_level, messages, environment_factory=Counter)

    class Scaled:
        __name__ = "scaled"

        def normalize(self, scores):
            return scores

        def __call__(self, completions, **_):
            return [0.0 for _ in completions]

    with pytest.raises(
        ValueError, match="scaled normalizes its scores by earlier ones, so the sca"
    ):
        make_trainer(config, Scaled(), LEVELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
        {"rollout_engine": "hf"},
        {"sampler_processes": 1},
        {"prompt_sampling_kwargs": PILOT, "beta": 0.05},
        {"prompt_sampling_kwargs": PILOT | {"probe": "policy", "floor": 0.25, "column": None}},
    ],
    ids=[
        "one step",
        "several passes",
        "several parts",
        "hf",
        "another process",
        "a pilot",
        "a pilot and a probe",
    ],
)
def test_a_resumed_run_has_the_same_numbers_of_completions(tmp_path, options):
    """Two runs and a resumed one end with the same bits."""
    options = {**VARIANCE, **SIZED, "max_steps": 8, "save_steps": 3, "logging_steps": 1, **options}
    folders, ends = [tmp_path / "whole", tmp_path / "parts"], []
    for folder in folders:
        trainer = make_trainer(make_config(folder, **options), REWARD, LEVELS)
        trainer.train()
        ends.append(weights(trainer))
    name = "prompt_sampling/largest_group"
    sizes = [row[name] for row in metrics_of(trainer.args) if name in row]  # one for each rollout
    if "pilot" not in options["prompt_sampling_kwargs"]:
        assert sizes[0] == 4.0
    assert max(sizes) > 4.0
    saved = sorted((folders[1] / "run").glob("checkpoint-*"))
    assert saved[0].name != "checkpoint-8"
    for path in saved[1:]:
        shutil.rmtree(path)
    resumed = make_trainer(make_config(folders[1], **options), REWARD, LEVELS)
    resumed.train(resume_from_checkpoint=True)
    assert equal(*ends)
    assert equal(ends[0], weights(resumed))


@pytest.mark.slow
def test_with_stale_rollouts_numbers_of_completions_follow_the_rewards_that_are_known(tmp_path):
    """Those of the first three rollouts are drawn before any."""
    options = {**VARIANCE, **SIZED, "max_steps": 8, "logging_steps": 1, "max_staleness": 2}
    trainer = make_trainer(make_config(tmp_path, **options), REWARD, LEVELS)
    trainer.train()
    sizes = [row["prompt_sampling/largest_group"] for row in metrics_of(trainer.args)]
    assert sizes[:3] == [4.0] * 3 and max(sizes[3:]) > 4.0


def test_a_probe_of_the_policy_needs_whole_weights(tmp_path):
    with pytest.raises(
        ValueError, match=r"probe is policy and parallel is fsdp2; each process reads"
    ):
        make_config(tmp_path, **VARIANCE, **POLICY, parallel="fsdp2")
    make_config(tmp_path, **VARIANCE, **TEXT, parallel="fsdp2")
    with pytest.raises(ValueError, match="probe is text but has no effect without prompt_sampling"):
        make_config(tmp_path, **TEXT)


def test_the_probe_of_the_text_reads_the_tokens_of_all_prompts(tmp_path):
    rows = Dataset.from_dict({"prompt": ["w1 w2 w2", "w2 w1 w2", "w3"]})
    config = make_config(tmp_path, **VARIANCE, **TEXT, data_seed=5)
    source = make_trainer(config, rows=rows).make_parts()[0].rollouts.prompts
    assert source.sampler.candidates(1).tolist() == [0, 1, 2]
    expected = token_features([source.token_ids(number) for number in range(3)], seed=5)
    assert (source.sampler.look(np.array([2, 0])) == expected[[2, 0]]).all()


def run(folder: Path, reward=REWARD, **options):
    options = {**VARIANCE, "max_steps": 6, "logging_steps": 1, "save_steps": 2, **options}
    trainer = make_trainer(make_config(folder, **options), reward)
    trainer.train(resume_from_checkpoint=(folder / "run").exists())
    return trainer


@pytest.mark.slow
def test_where_another_process_samples_the_same_prompts_are_drawn(tmp_path):
    """Also by a run that resumes in its midst."""
    beside = {"sampler_processes": 1}
    here, there = run(tmp_path / "here"), run(tmp_path / "there", **beside)
    assert equal(weights(here), weights(there))
    for folder in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(tmp_path / "there" / "run" / folder)
    assert equal(weights(here), weights(run(tmp_path / "there", **beside)))


@pytest.mark.slow
def test_runs_with_stale_rollouts_have_the_same_draws(tmp_path):
    """Whatever finishes first, draws use the rollouts that the schedule says: none of the last
    two. The weights that sample depend on the time, and these rewards do not depend on them. A
    resumed run goes on."""
    one, other = (run(tmp_path / name, by_place, max_staleness=2) for name in "ab")
    shares = [row["prompt_sampling/effective_share"] for row in metrics_of(one.args)]
    assert shares[:3] == [1.0] * 3 and min(shares[3:]) < 1.0
    assert shares == [row["prompt_sampling/effective_share"] for row in metrics_of(other.args)]
    shutil.rmtree(tmp_path / "a" / "run" / "checkpoint-6")
    resumed = run(tmp_path / "a", by_place, max_staleness=2)
    epochs = [row["epoch"] for row in metrics_of(resumed.args)]
    assert epochs == [row["epoch"] for row in metrics_of(other.args)]
