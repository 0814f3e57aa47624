"""Options of TrainingArguments: logs, evaluations, checkpoints, determinism; and a template."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloo import RLOOTrainer
from support.models import make_model
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    make_trainer,
    metrics_of,
    weights,
)

EPOCHS = {"max_steps": -1, "num_train_epochs": 2}  # of 4 steps: 12 rows, 3 prompts a step


def rows_of(config, name: str) -> list[dict]:
    text = Path(config.output_dir, name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def logged(trainer) -> list[int]:
    return [row["step"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"logging_strategy": "epoch"}, [4, 8]),
        ({"logging_strategy": "epoch", "logging_first_step": True}, [1, 4, 8]),
        ({"logging_strategy": "no"}, [8]),  # what no log has had, with the totals
        ({"logging_strategy": "steps", "logging_steps": 3}, [3, 6, 8]),
    ],
)
def test_logs_are_written_when_the_strategy_says(tmp_path, options, steps):
    trainer = make_trainer(make_config(tmp_path, **EPOCHS, **options))
    trainer.train()
    assert logged(trainer) == steps
    by_step = {row["step"]: row["loss"] for row in metrics_of(trainer.args)}
    if options["logging_strategy"] == "epoch":
        last = [by_step[step] for step in (5, 6, 7, 8)]
        assert trainer.state.log_history[-2]["loss"] == pytest.approx(sum(last) / 4)


@pytest.mark.slow
def test_with_logs_by_epoch_all_completions_of_its_last_rollout_are_recorded(tmp_path):
    options = {"logging_strategy": "epoch", "log_completions": True}
    trainer = make_trainer(make_config(tmp_path, **EPOCHS, **options))
    trainer.train()
    recorded = [row["step"] for row in rows_of(trainer.args, "completions.jsonl")]
    counts = {step: recorded.count(step) for step in range(1, 9)}
    assert [step for step, count in counts.items() if count == 12] == [4, 8], counts


@pytest.mark.slow
def test_evaluations_wait_for_eval_delay(tmp_path):
    config = make_config(tmp_path, eval_strategy="steps", eval_steps=1, eval_delay=3)
    make_trainer(config, eval_dataset=ROWS.select(range(2))).train()
    assert [row["step"] for row in rows_of(config, "evaluations.jsonl")] == [3, 4]


@pytest.mark.slow
def test_a_checkpoint_of_the_model_alone_loads_and_is_not_resumed_from(tmp_path):
    options = {"save_steps": 2, "save_only_model": True}
    config = make_config(tmp_path, **options)
    trainer = make_trainer(config)
    trainer.train()
    folder = Path(config.output_dir, "checkpoint-4")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert equal(weights(trainer), dict(loaded.named_parameters()))
    whole = make_config(tmp_path, output_dir=str(tmp_path / "whole"), save_steps=2)
    make_trainer(whole).train()
    names = {path.name for path in Path(whole.output_dir, "checkpoint-4").iterdir()}
    missing = names - {path.name for path in folder.iterdir()}
    assert {"optimizer.safetensors", "rng.json", "trainer_state.json"} <= missing
    with pytest.raises(ValueError, match=r"checkpoint-2 holds the model alone, .*save_only_model"):
        make_trainer(config).train(resume_from_checkpoint=str(folder.with_name("checkpoint-2")))
    with pytest.raises(ValueError, match=r"none of the 2 checkpoints .* holds the model alone"):
        make_trainer(config).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_the_best_of_models_alone_is_loaded_at_the_end(tmp_path):
    config = make_config(
        tmp_path,
        save_only_model=True,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    trainer = make_trainer(config, eval_dataset=ROWS.select(range(2)))
    trainer.train()
    best = trainer.state.best_model_checkpoint
    loaded = AutoModelForCausalLM.from_pretrained(best, dtype=torch.float32)
    assert equal(weights(trainer), dict(loaded.named_parameters()))


@pytest.mark.slow
def test_a_run_that_is_stopped_saves_all_of_its_state_even_so(tmp_path):
    def stop_in_step_3(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise KeyboardInterrupt
        return count_words(completions)

    options = {"save_steps": 1, "save_only_model": True}
    config = make_config(tmp_path, **options)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        make_trainer(config, reward=stop_in_step_3).train()
    resumed = make_trainer(config)
    resumed.train(resume_from_checkpoint=True)
    straight = make_config(tmp_path, output_dir=str(tmp_path / "straight"), **options)
    trainer = make_trainer(straight)
    trainer.train()
    assert equal(weights(resumed), weights(trainer))
    losses = [[row["loss"] for row in metrics_of(of)] for of in (config, straight)]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_of_deterministic_kernels_alone_trains(tmp_path, monkeypatch):
    for name in (
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "FLASH_ATTENTION_DETERMINISTIC",
    ):
        monkeypatch.setenv(name, "0")  # what it sets is put back
    seen = []

    def reward(completions, **_):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return count_words(completions)

    try:
        make_trainer(make_config(tmp_path, max_steps=2, full_determinism=True), reward).train()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
    assert set(seen) == {True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is possible")
def test_tf32_needs_a_gpu_that_has_it(tmp_path):
    with pytest.raises(ValueError, match="tf32"):
        make_trainer(make_config(tmp_path, tf32=True))
    make_trainer(make_config(tmp_path, tf32=False))


@pytest.mark.slow
def test_a_chat_template_renders_prompts_and_is_saved(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }} w9 {% endfor %}"
    tokenizer = make_tokenizer()
    before = tokenizer.chat_template
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1 w2"}]] * 4})
    make_model("qwen3").save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    config = make_config(tmp_path, chat_template=template, max_steps=1, num_prompts=4)
    trainer = RLOOTrainer(
        str(tmp_path / "tiny"), lambda completions, **_: [0.0, 1.0] * 8, config, rows
    )
    (prompt,) = trainer._source.all_prompts(1)
    assert prompt.token_ids == tokenizer("w1 w2 w9 ")["input_ids"]
    trainer.train()
    assert AutoTokenizer.from_pretrained(config.output_dir).chat_template == template
    given = RLOOTrainer(str(tmp_path / "tiny"), count_words, config, rows, None, tokenizer)
    assert (given.processing_class.chat_template, tokenizer.chat_template) == (template, before)
