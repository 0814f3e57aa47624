import json
import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from rloo import RLOOConfig
from support.models import CONFIGS, make_model
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


def test_reward_rises_and_falls_when_negated(tmp_path):
    means = {}
    for sign in (1, -1):
        options = {"max_steps": 20, "num_generations": 8, "beta": 0.0, "learning_rate": 3e-2}
        config = make_config(tmp_path / str(sign), **options)
        make_trainer(
            config, lambda completions, s=sign, **_: [s * r for r in count_words(completions)]
        ).train()
        rows = metrics_of(config)
        means[sign] = [sign * sum(r["reward"] for r in part) / 5 for part in (rows[:5], rows[-5:])]
    assert means[1][1] > means[1][0] + 2
    assert means[-1][1] < 0.5 * means[-1][0]


def test_two_runs_with_equal_configs_are_identical_to_the_last_bit(tmp_path):
    results = []
    for number in range(2):
        config = make_config(tmp_path / str(number))
        trainer = make_trainer(config)
        trainer.train()
        results.append((weights(trainer), without_times(metrics_of(config))))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    other = make_trainer(make_config(tmp_path / "other", seed=8))
    other.train()
    assert not equal(results[0][0], weights(other))


@pytest.mark.slow
def test_the_budget_of_a_micro_batch_does_not_change_the_result(tmp_path):
    results = []
    for budget in (10_000, 60, 12):
        # SGD, since Adam makes steps of the full rate out of rounding errors.
        config = make_config(
            tmp_path / str(budget),
            max_tokens_per_micro_batch=budget,
            max_steps=2,
            optim="sgd",
            learning_rate=0.5,
        )
        trainer = make_trainer(config)
        trainer.train()
        results.append(weights(trainer))
    for other in results[1:]:
        for name, expected in results[0].items():
            assert torch.allclose(other[name], expected, atol=1e-5), name


def test_kl_is_zero_at_step_0_and_the_engine_agrees_with_the_trainer(tmp_path):
    config = make_config(tmp_path)
    make_trainer(config).train()
    rows = metrics_of(config)
    assert rows[0]["kl"] == 0
    assert all(row["kl"] != 0 for row in rows[1:])
    assert all(row["mismatch/max"] < 1e-5 for row in rows)
    assert all(row["clip_ratio/region_mean"] == 0 for row in rows)


def test_several_steps_on_a_rollout_clip_and_keep_the_old_logprobs(tmp_path):
    config = make_config(tmp_path, num_iterations=3, max_steps=6, epsilon=0.01)
    make_trainer(config).train()
    rows = metrics_of(config)
    assert [("reward" in row) for row in rows] == [True, False, False] * 2
    assert rows[0]["clip_ratio/region_mean"] == 0
    assert all(rows[i]["clip_ratio/region_mean"] > 0 for i in (1, 2, 4, 5))


def test_completions_without_signal_are_counted_but_not_computed(tmp_path):
    def only_long_prompts(completions, prompts, **_):
        rewards = count_words(completions)
        return [r if len(p.split()) > 4 else 1.0 for r, p in zip(rewards, prompts, strict=True)]

    config = make_config(tmp_path, beta=0.0, num_prompts=12, max_steps=1)
    trainer = make_trainer(config, only_long_prompts)
    seen = []
    batch = trainer.policy.batch
    trainer.policy.batch = lambda samples: seen.append(len(samples)) or batch(samples)
    trainer.train()
    row = metrics_of(config)[0]
    assert 0 < sum(seen) <= 24 < 48
    assert row["update/computed_share"] == sum(seen) / 48
    assert row["groups/signal"] <= 0.5
    constant = make_trainer(
        make_config(tmp_path / "constant", beta=0.0),
        lambda completions, **_: [1.0] * len(completions),
    )
    before = weights(constant)
    constant.train()
    assert equal(before, weights(constant))
    unscored = make_config(tmp_path / "unscored", beta=0.0)
    make_trainer(unscored, lambda completions, **_: [None] * len(completions)).train()
    for row in (*metrics_of(constant.args), *metrics_of(unscored)):
        assert row["loss"] == row["grad_norm"] == 0 and row["update/no_signal"] == 1
        assert row["entropy"] > 3 and "learning_rate" in row


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_a_missing_reward_trains_as_if_the_completion_were_absent(tmp_path, beta):
    """A prompt's fourth completion has no score, is not sampled at all, or scores 0."""
    options = {"beta": beta, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1}
    options |= {"max_grad_norm": 0, "log_completions": True, "logging_steps": 1}

    def train(name, num_generations, fourth):
        def reward(completions, **_):
            scores = count_words(completions)
            return [fourth if i % num_generations == 3 else s for i, s in enumerate(scores)]

        config = make_config(tmp_path / name, num_generations=num_generations, **options)
        trainer = make_trainer(config, reward)
        trainer.train()
        return config, torch.cat([p.flatten() for p in weights(trainer).values()])

    config, missing = train("missing", 4, None)
    _, absent = train("absent", 3, None)
    _, zero = train("zero", 4, 0.0)
    assert torch.allclose(missing, absent, atol=1e-6)
    assert (zero - absent).abs().max() > 1e-3
    assert [row["reward/unscored"] for row in metrics_of(config)] == [3, 3]
    recorded = Path(config.output_dir, "completions.jsonl").read_text()
    assert recorded.count('"reward": null, "scores"') == 2 * 3


@pytest.mark.parametrize("iterations", [1, 2])
def test_nothing_scored_is_no_step_of_the_weights(tmp_path, iterations):
    config = make_config(tmp_path, num_iterations=iterations)
    trainer = make_trainer(config, lambda completions, **_: [None] * len(completions))
    before = weights(trainer)
    trainer.train()
    assert equal(before, weights(trainer))


def test_a_gradient_that_stays_infinite_stops_the_run_before_anything_is_saved(tmp_path):
    trainer = make_trainer(make_config(tmp_path, max_steps=10, save_steps=1))
    before = weights(trainer)
    backward = trainer.policy.stepper.backward
    trainer.policy.stepper.backward = lambda loss, **_: backward(loss * float("nan"))
    with pytest.raises(FloatingPointError, match="not finite in 3 steps in a row"):
        trainer.train()
    assert equal(before, weights(trainer))
    rows = metrics_of(trainer.args)
    assert [row["update/nonfinite"] for row in rows] == [1, 1, 1]


def test_ctrl_c_saves_a_checkpoint_from_which_the_run_goes_on_exactly(tmp_path):
    whole = make_trainer(make_config(tmp_path / "whole", max_steps=5))
    whole.train()
    config = make_config(tmp_path / "parts", max_steps=5, save_strategy="no")
    calls = []

    def interrupting(completions, **_):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return count_words(completions)

    with pytest.raises(KeyboardInterrupt):
        make_trainer(config, interrupting).train()
    run = Path(config.output_dir)
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(whole), weights(resumed))


def test_the_result_loads_with_transformers_and_says_what_it_is(tmp_path):
    config = make_config(tmp_path, eval_on_start=True, eval_kwargs={"pass_k": [1, 2]})
    trainer = make_trainer(config, eval_dataset=ROWS)
    trainer.train()
    model = transformers.AutoModelForCausalLM.from_pretrained(config.output_dir)
    transformers.AutoTokenizer.from_pretrained(config.output_dir)
    assert equal(weights(trainer), dict(model.named_parameters()))
    summary = json.loads(Path(config.output_dir, "summary.json").read_text())
    for moment in ("start", "end"):
        for name in ("pass@1", "pass@2", "pass@1_greedy"):
            low, high = summary[moment][f"{name}_interval"]
            assert 0 <= low <= summary[moment][name] <= high <= 1
    assert summary["status"] == "finished"
    assert summary["seed"] == 7
    assert summary["config"]["packing"] is True
    assert summary["config"]["rollout_engine"] == "native"
    assert summary["config"]["max_tokens_per_micro_batch"] > 0
    assert summary["num_tokens"] > 0 and summary["wall_seconds"] > 0
    assert set(summary["versions"]) == {"python", "torch", "transformers", "rloo"}
    rows = metrics_of(config)
    assert len(rows) == 4 and rows[-1]["wall_time"] < summary["wall_seconds"]
    for before, row in pairwise(rows):
        assert row["wall_time"] >= before["wall_time"] + row["step_time"]
    assert RLOOConfig(**summary["config"]) == replace(
        config,
        packing=True,
        # No oneDNN: the model is too small for a measurement.
        cpu_kwargs={"kernels": summary["config"]["cpu_kwargs"]["kernels"], "onednn": []},
        rollout_engine="native",
        max_tokens_per_micro_batch=summary["config"]["max_tokens_per_micro_batch"],
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_trains(tmp_path, name):
    config = make_config(tmp_path, max_steps=2, max_completion_length=12)
    model = make_model(name)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = make_trainer(config, model=model)
    trainer.train()
    changed = [not torch.equal(p, before[n]) for n, p in model.named_parameters()]
    assert sum(changed) > 0.8 * len(changed)
    assert all(row["mismatch/max"] < 1e-4 for row in metrics_of(config))


def test_faults_are_found_before_the_first_sample(tmp_path):
    def never(completions, **_):
        raise AssertionError("sampled")

    def refuse(match, *, rows=ROWS, reward=never, **options):
        with pytest.raises(ValueError, match=match):
            make_trainer(make_config(tmp_path, **options), reward, rows).train()

    refuse("0 rows", rows=ROWS.select([]))
    refuse("no column 'prompt'", rows=ROWS.rename_column("prompt", "question"))
    refuse("prompt", rows=ROWS, max_prompt_length=4)
    refuse("answer", reward=lambda completions, answer: [0.0])
    refuse("max_completion_length", max_completion_length=100_000)
    refuse("no reward function", reward=[])
    refuse("reward_weights", reward_weights=[1.0, 2.0])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    config = make_config(tmp_path, max_steps=1)
    make_trainer(config).train()
    other = make_trainer(config, model=make_model("gpt2"))
    with pytest.raises(ValueError, match="checkpoint is of another model"):
        other.train(resume_from_checkpoint=True)


def interrupt_at(step):
    """The reward, and a Ctrl-C while it scores the rollout of that step."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return count_words(completions)

    return reward


def make_interrupted(tmp_path, **options) -> RLOOConfig:
    config = make_config(tmp_path, save_strategy="no", **options)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(config, interrupt_at(3)).train()
    return config


@pytest.mark.slow
def test_tokens_of_a_rollout_that_was_thrown_away_are_not_counted(tmp_path):
    make_trainer(make_config(tmp_path / "whole")).train()
    config = make_interrupted(tmp_path / "parts")
    make_trainer(config).train(resume_from_checkpoint=True)
    whole = metrics_of(make_config(tmp_path / "whole"))
    assert [r["num_tokens"] for r in metrics_of(config)] == [r["num_tokens"] for r in whole]


def test_a_resumed_run_refuses_what_its_optimizer_would_ignore(tmp_path):
    config = make_interrupted(tmp_path)
    with pytest.raises(ValueError, match=r"learning_rate is 0\.5 and was 0\.01"):
        make_trainer(replace(config, learning_rate=0.5)).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_resumed_run_names_the_other_options_that_differ(tmp_path):
    config = make_interrupted(tmp_path)
    trainer = make_trainer(replace(config, beta=0.9))
    trainer.train(resume_from_checkpoint=True)
    assert "resumed with other options: beta 0.05 -> 0.9" in trainer.monitor.notes


def test_a_checkpoint_that_began_from_other_weights_is_refused(tmp_path):
    config = make_interrupted(tmp_path)
    other = make_trainer(config, model=make_model("qwen3", seed=1))
    with pytest.raises(ValueError, match="started from other weights"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_packed_run_goes_on_padded_where_that_is_asked_for(tmp_path):
    config = make_interrupted(tmp_path)
    make_trainer(replace(config, packing=False, rollout_engine="hf")).train(True)
    assert all(row["mismatch/max"] < 1e-5 for row in metrics_of(config))


def test_the_model_survives_a_failing_final_evaluation(tmp_path):
    config = make_config(tmp_path, eval_on_start=True, save_strategy="no", max_steps=2)
    calls = []

    def fails_at_the_end(completions, **_):
        calls.append(1)
        if len(calls) > 4:  # two at the start (sampled, greedy), one a step
            raise ValueError("no")
        return count_words(completions)

    trainer = make_trainer(config, fails_at_the_end, eval_dataset=ROWS)
    with pytest.raises(ValueError, match="no"):
        trainer.train()
    model = transformers.AutoModelForCausalLM.from_pretrained(config.output_dir)
    assert equal(weights(trainer), dict(model.named_parameters()))
    assert json.loads(Path(config.output_dir, "summary.json").read_text())["status"] == "failed"


def test_a_run_that_failed_in_its_first_rollout_leaves_the_folder_free(tmp_path):
    def broken(completions, **_):
        raise ValueError("no")

    config = make_config(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="no"):
        make_trainer(config, broken).train()
    assert not list(Path(config.output_dir).glob("checkpoint-*"))
    make_trainer(config).train()


def test_evaluation_without_data_is_refused_at_once(tmp_path):
    for options in ({"eval_on_start": True}, {"eval_strategy": "steps"}):
        with pytest.raises(ValueError, match="there is nothing to evaluate on"):
            make_trainer(make_config(tmp_path, **options))


def test_an_evaluation_set_that_nothing_uses_is_noted(tmp_path):
    trainer = make_trainer(make_config(tmp_path), eval_dataset=ROWS)
    assert any("evaluation set is not used" in note for note in trainer.policy.notes)


def test_truncated_and_dropped_prompts_are_counted_in_a_note(tmp_path):
    for mode, words in (("drop", "6 prompts are too long"), ("left", "6 prompts are cut")):
        config = make_config(tmp_path, max_prompt_length=4, overlong_prompts=mode)
        assert any(note.startswith(words) for note in make_trainer(config).policy.notes)


def test_the_forward_is_checked_on_the_first_scored_rollout(tmp_path):
    calls = []

    def late(completions, **_):
        calls.append(1)
        return count_words(completions) if len(calls) > 1 else [None] * len(completions)

    trainer = make_trainer(make_config(tmp_path), late)
    trainer.model.set_attn_implementation("sdpa")  # packing would let completions see each other
    trainer.train()
    assert not trainer.policy.packed
    assert any("packed log-probs differ" in note for note in trainer.monitor.notes)


def test_the_schedule_counts_steps_without_signal(tmp_path):
    config = make_config(tmp_path, lr_scheduler_type="linear", beta=0.0)
    trainer = make_trainer(config, lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    assert set(trainer.policy.stepper.scheduler.get_last_lr()) == {0.0}


@pytest.mark.slow
def test_dropout_kept_as_numbers_is_removed_too(tmp_path):
    options = transformers.OPTConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    trainer = make_trainer(
        make_config(tmp_path, gradient_checkpointing=True),
        model=transformers.AutoModelForCausalLM.from_config(options),
    )
    trainer.train()
    rows = metrics_of(trainer.args)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert all(row["mismatch/max"] < 1e-4 for row in rows)
    assert any("dropout (up to 0.3)" in note for note in trainer.monitor.notes)
