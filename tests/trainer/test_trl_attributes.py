"""What scripts and callbacks read of TRL's trainer is there to read."""

import logging

import pytest
import torch
from datasets import Dataset

from rloo.trainer.evaluate import loss_of
from rloo.types import Group, Prompt
from support.reward_models import make_reward_model, make_reward_tokenizer
from support.training import ROWS, count_words, make_config, make_trainer, metrics_of

HELD_OUT = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6"]})


def test_the_attributes_of_trls_trainer(tmp_path):
    model, tokenizer = make_reward_model(), make_reward_tokenizer()
    config = make_config(
        tmp_path, temperature=0.7, epsilon=0.3, num_generations_eval=2, reward_weights=[1.0, 0.5]
    )
    trainer = make_trainer(
        config, [count_words, model], reward_processing_classes=[None, tokenizer]
    )
    assert trainer.reward_funcs == [count_words, model]
    assert trainer.reward_processing_classes == [None, tokenizer]
    assert trainer.reward_weights.tolist() == [1.0, 0.5]
    assert (trainer.beta, trainer.num_generations, trainer.temperature) == (0.05, 4, 0.7)
    assert (trainer.num_generations_eval, trainer.epsilon_low, trainer.epsilon_high) == (
        2,
        0.3,
        0.3,
    )
    assert trainer.model_wrapped is trainer.model and trainer.aux_loss_enabled is False
    assert trainer.chat_template_kwargs == {}
    wanted = trainer.generation_config
    assert (wanted.max_new_tokens, wanted.temperature, wanted.do_sample) == (8, 0.7, True)
    assert wanted.eos_token_id == trainer.eos_token_ids == [2]
    with pytest.raises(AttributeError, match="'RLOOTrainer' object has no attribute 'betas'"):
        _ = trainer.betas


def test_accelerator_unwraps_gathers_and_knows_the_process(tmp_path):
    trainer = make_trainer(make_config(tmp_path))
    accelerator = trainer.accelerator
    assert accelerator is trainer.accelerator and accelerator.is_main_process
    assert accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    values = torch.arange(3.0)
    assert torch.equal(accelerator.gather(values), values)
    assert torch.equal(accelerator.gather_for_metrics(values), values)
    assert accelerator.device.type == "cpu" and accelerator.num_processes == 1


@pytest.mark.parametrize("stream", [False, True])
def test_loaders_have_each_row_as_often_as_it_is_sampled(tmp_path, stream):
    rows = ROWS.to_iterable_dataset() if stream else ROWS
    trainer = make_trainer(make_config(tmp_path), rows=rows, eval_dataset={"a": HELD_OUT})
    batches = list(trainer.get_train_dataloader())
    assert [len(batch) for batch in batches] == [12] * 4  # 3 prompts of 12, 4 completions each
    prompts = [row["prompt"] for batch in batches for row in batch]
    assert prompts == [prompt for prompt in ROWS["prompt"] for _ in range(4)]
    held_out = list(trainer.get_eval_dataloader("a"))
    assert held_out == [[{"prompt": text}] * 4 for text in HELD_OUT["prompt"]]


def test_a_stream_is_read_by_every_process_and_scripts_are_told_so(tmp_path):
    rows = ROWS.to_iterable_dataset()
    assert make_trainer(make_config(tmp_path / "rows")).args.accelerator_config is None
    shown = make_trainer(make_config(tmp_path / "plain"), rows=rows).args.accelerator_config
    assert (shown.dispatch_batches, shown.even_batches) == (False, True)
    with pytest.warns(UserWarning, match=r"accelerator_config is \{'dispatch_batches': True\}, w"):
        config = make_config(tmp_path / "run", accelerator_config={"dispatch_batches": True})
    make_trainer(config)
    with pytest.raises(ValueError, match="Iterable datasets require `dispatch_batches=False`"):
        make_trainer(config, rows=rows)


def test_the_last_rollout_is_in_its_logs(tmp_path):
    def reward(completions, log_extra, **_):
        log_extra("first", [text[:2] for text in completions])
        return count_words(completions)

    trainer = make_trainer(make_config(tmp_path, max_steps=1), reward)
    trainer.train()
    logs = trainer._logs
    assert len(logs["completion"]) == len(logs["prompt"]) == 12 and logs["images"] == []
    assert logs["extra"]["first"] == [text[:2] for text in logs["completion"]]
    assert logs["rewards"] == {"reward": count_words(logs["completion"])}


def test_the_last_entry_of_the_history_has_the_metrics_since_the_last_log(tmp_path):
    config = make_config(tmp_path, logging_steps=3)
    trainer = make_trainer(config)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history] == [3, 4]
    last, row = trainer.state.log_history[-1], metrics_of(config)[-1]
    assert "train_loss" in last
    assert {name: last[name] for name in ("reward", "kl", "loss", "rewards/count_words/std")} == {
        name: row[name] for name in ("reward", "kl", "loss", "rewards/count_words/std")
    }


def test_an_evaluation_has_a_loss_of_0_that_chooses_no_model(tmp_path):
    groups = [
        Group(Prompt(0, [3], "w1"), [], ["a", "b", "c"], [0.1, 0.7, None]),
        Group(Prompt(1, [3], "w1"), [], ["a", "b"], [-2.0, 5.0]),
        Group(Prompt(2, [3], "w1"), [], ["a"], [1.0]),
    ]
    assert loss_of(groups) == pytest.approx(0.0, abs=1e-6)
    trainer = make_trainer(make_config(tmp_path), eval_dataset={"a": HELD_OUT, "b": ROWS})
    metrics = trainer.evaluate()
    assert metrics["eval_a_loss"] == pytest.approx(0.0, abs=1e-6) and "eval_b_loss" in metrics
    options = {"eval_strategy": "steps", "metric_for_best_model": "eval_a_loss"}
    with pytest.raises(ValueError, match=r"0 in every evaluation.*take reward"):
        make_trainer(make_config(tmp_path, **options), eval_dataset={"a": HELD_OUT, "b": ROWS})


def test_a_completion_that_nobody_scored_is_warned_of_once(tmp_path, caplog):
    def none(completions, **_):
        return [None] * len(completions)

    with caplog.at_level(logging.WARNING, logger="rloo"):
        make_trainer(make_config(tmp_path, max_steps=2), none).train()
    (record,) = [r for r in caplog.records if "All reward functions returned None" in r.message]
    assert "'prompt': 'w" in record.message and "'completion': " in record.message
