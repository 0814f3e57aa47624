"""RLOOTrainer as TRL's and Hugging Face's users know it: arguments, evaluation sets, callbacks, the
best model, the hub. What the loop computes is tested in test_train.py."""

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import transformers
import yaml
from datasets import Dataset, DatasetDict, IterableDatasetDict

from rloo import RLOOConfig, RLOOTrainer
from rloo.config.show import render_resolved
from support.models import make_model
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    equal,
    identical,
    make_config,
    make_trainer,
    metrics_of,
    train_until_power_cut,
    weights,
)

HELD_OUT = Dataset.from_dict({"prompt": ["w1 w2 w3", "w4 w5 w6", "w7 w8 w9"]})


def evaluations_of(config) -> list[dict]:
    lines = Path(config.output_dir, "evaluations.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# -- arguments ------------------------------------------------------------------------------------


def test_arguments_have_the_order_and_names_of_trl_and_reward_model_is_another_name(tmp_path):
    config = make_config(tmp_path, max_steps=1)
    stop = transformers.EarlyStoppingCallback()
    by_place = RLOOTrainer(
        make_model("qwen3"),
        count_words,
        config,
        ROWS,
        HELD_OUT,
        make_tokenizer(),
        None,
        [stop],
        (None, None),
        None,
        None,
    )
    assert by_place.train_dataset is ROWS and by_place.eval_dataset is HELD_OUT
    assert stop in by_place.callback_handler.callbacks
    named = make_trainer(config, reward=None, reward_model=count_words)
    assert named.rewards.names == by_place.rewards.names == ["count_words"]
    with pytest.raises(ValueError, match="reward_funcs and reward_model mean the same"):
        make_trainer(config, reward_model=count_words)
    with pytest.raises(ValueError, match=r"args is a transformers.*Arguments; it must be"):
        make_trainer(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


@pytest.mark.parametrize("lacking", ["train_dataset", "eval_dataset"])
def test_columns_are_checked_before_the_model_is_loaded(tmp_path, lacking):
    def matches(completions, answer, **_):
        return [float(a == c) for a, c in zip(answer, completions, strict=True)]

    full = Dataset.from_dict({"prompt": ["w1"], "answer": ["w2"]})
    rows = {"train_dataset": full, "eval_dataset": full, lacking: HELD_OUT}
    with pytest.raises(ValueError, match="requires the parameter 'answer'"):
        RLOOTrainer(str(tmp_path / "missing"), matches, make_config(tmp_path), **rows)
    with pytest.raises((ValueError, OSError), match="missing"):
        RLOOTrainer(
            str(tmp_path / "missing"), matches, make_config(tmp_path), full, eval_dataset=full
        )


def test_without_options_the_folder_has_the_models_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model("qwen3").save_pretrained("some/tiny")
    make_tokenizer().save_pretrained("some/tiny")
    trainer = RLOOTrainer("some/tiny", count_words, train_dataset=ROWS)
    assert (trainer.args.output_dir, trainer.args.model) == ("tiny-RLOO", "some/tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained("some/tiny")
    assert RLOOTrainer(model, count_words, train_dataset=ROWS).args.output_dir == "tiny-RLOO"


def test_a_model_without_a_name_needs_its_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"no name by which its tokenizer .*processing_class"):
        RLOOTrainer(make_model("qwen3"), count_words, make_config(tmp_path), ROWS)


def test_what_a_loaded_model_makes_idle_is_said(tmp_path):
    config = make_config(tmp_path, model_init_kwargs={"revision": "x"})
    with pytest.warns(UserWarning, match="model_init_kwargs is given with a model"):
        make_trainer(config)
    with pytest.warns(UserWarning, match="quantization_config is given with a model"):
        make_trainer(make_config(tmp_path), quantization_config=transformers.BitsAndBytesConfig())


def test_training_data_is_needed_to_train_and_not_to_evaluate(tmp_path):
    with pytest.raises(ValueError, match="there is no dataset: `train_dataset` is required"):
        make_trainer(make_config(tmp_path), rows=None)
    trainer = make_trainer(make_config(tmp_path), rows=None, eval_dataset=HELD_OUT)
    assert trainer.evaluate()["eval_num_prompts"] == 3
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        trainer.train()


def test_a_given_optimizer_and_schedule_are_used(tmp_path):
    config = make_config(tmp_path, max_steps=3, beta=0.0, max_grad_norm=0)
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step > 0 else 1.0)
    trainer = RLOOTrainer(
        model,
        count_words,
        config,
        ROWS,
        processing_class=make_tokenizer(),
        optimizers=(optimizer, schedule),
    )
    assert trainer.optimizer is optimizer and trainer.lr_scheduler is schedule
    before, moves = weights(trainer), []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            parameter = next(model.parameters())
            self.expected = parameter.detach() - state_lr() * parameter.grad

        def on_optimizer_step(self, args, state, control, model, **kwargs):
            parameter = next(model.parameters())
            moves.append(torch.equal(parameter.detach(), self.expected))

    def state_lr():
        return optimizer.param_groups[0]["lr"]

    trainer.add_callback(Watch)
    trainer.train()
    assert moves == [True] * 3  # each step was SGD's
    assert [row["learning_rate"] for row in metrics_of(config)] == [0.5, 0.0, 0.0]
    assert not equal(before, weights(trainer))


@pytest.mark.slow
def test_gradients_of_a_step_that_an_error_ended_are_not_of_the_next(tmp_path):
    """A script may catch an error and train again."""

    class FailsOnce(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 1 and not seen:
                seen.append(1)
                raise RuntimeError("no step today")

    ends = []
    for seen in ([], [1]):
        config = make_config(tmp_path / str(len(seen)), max_steps=3, max_grad_norm=0)
        trainer = make_trainer(config, callbacks=[FailsOnce()])
        if not seen:
            with pytest.raises(RuntimeError, match="no step today"):
                trainer.train()
            assert any(p.grad is not None for p in trainer.model.parameters())
        trainer.train("auto")
        ends.append(weights(trainer))
    assert identical(*ends)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: (None, object()), "a schedule is given without its optimizer"),
        (
            lambda m: (torch.optim.SGD(make_model("qwen3").parameters()), None),
            r"holds 0 of the \d+ trained parameters and \d+ of another model",
        ),
        (
            lambda m: (torch.optim.SGD(list(m.parameters())[:2]), None),
            r"holds 2 of the \d+ trained parameters and 0 of another model",
        ),
        (
            lambda m: (
                torch.optim.SGD(m.parameters()),
                torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(m.parameters())),
            ),
            "the schedule given belongs to another optimizer",
        ),
    ],
    ids=["alone", "foreign", "part", "other"],
)
def test_an_optimizer_that_would_not_train_the_model_is_refused(tmp_path, make, message):
    model = make_model("qwen3")
    with pytest.raises(ValueError, match=message):
        RLOOTrainer(
            model,
            count_words,
            make_config(tmp_path),
            ROWS,
            processing_class=make_tokenizer(),
            optimizers=make(model),
        )


@pytest.mark.slow
def test_train_returns_what_trainer_returns_and_the_history_ends_with_it(tmp_path):
    config = make_config(tmp_path, logging_steps=2)
    trainer = make_trainer(config)
    result = trainer.train()
    losses = [row.get("loss", 0.0) for row in metrics_of(config)]
    assert result.global_step == 4
    assert result.training_loss == pytest.approx(sum(losses) / 4, abs=1e-12)
    assert result.metrics["train_steps_per_second"] == 4 / result.metrics["train_runtime"]
    assert result.metrics["train_samples_per_second"] == pytest.approx(
        12 * result.metrics["train_steps_per_second"]
    )
    history = trainer.state.log_history
    assert [entry["step"] for entry in history] == [2, 4, 4]
    assert history[-1] == {**result.metrics, "epoch": 1.0, "step": 4}
    assert history[0]["loss"] == pytest.approx(sum(losses[:2]) / 2, abs=1e-12)
    trainer.accelerator.print("done")
    trainer.end()


# -- evaluation sets ------------------------------------------------------------------------------

SETS = {
    "rows": (HELD_OUT, [""]),
    "stream": (HELD_OUT.to_iterable_dataset(), [""]),
    "dict of rows": ({"a": HELD_OUT, "b": ROWS}, ["a_", "b_"]),
    "dict of streams": ({"a": HELD_OUT.to_iterable_dataset()}, ["a_"]),
    "splits": (DatasetDict({"test": HELD_OUT, "hard": ROWS}), ["test_", "hard_"]),
    "splits of streams": (
        IterableDatasetDict({"test": HELD_OUT.to_iterable_dataset()}),
        ["test_"],
    ),
}


@pytest.mark.parametrize("form", SETS)
def test_every_form_of_evaluation_set_is_kept_and_measured(tmp_path, form):
    given, names = SETS[form]
    trainer = make_trainer(make_config(tmp_path), eval_dataset=given)
    assert trainer.eval_dataset is given
    metrics = trainer.evaluate()
    assert {name.split("num_prompts")[0] for name in metrics if name.endswith("num_prompts")} == {
        f"eval_{name}" for name in names
    }
    assert metrics[f"eval_{names[0]}num_prompts"] == 3
    assert 0 <= metrics[f"eval_{names[0]}reward"] <= 8
    other = make_trainer(make_config(tmp_path))
    assert other.eval_dataset is None
    assert other.evaluate(eval_dataset=given) == metrics
    with pytest.raises(ValueError, match="there is nothing to evaluate on"):
        other.evaluate()


def test_one_of_several_sets_is_evaluated_by_its_name(tmp_path):
    trainer = make_trainer(make_config(tmp_path), eval_dataset={"a": HELD_OUT, "b": ROWS})
    both = trainer.evaluate()
    alone = trainer.evaluate("b", metric_key_prefix="test")
    assert alone["test_b_reward"] == both["eval_b_reward"]
    assert not any(name.startswith("test_a") for name in alone)


def test_a_split_of_the_training_data_can_be_evaluated_on(tmp_path):
    rows = DatasetDict({"train": ROWS, "test": HELD_OUT})
    trainer = make_trainer(make_config(tmp_path, eval_split="test"), rows=rows)
    assert trainer.evaluate()["eval_num_prompts"] == 3


def test_of_a_stream_no_more_is_read_than_is_evaluated(tmp_path):
    def rows():
        yield from ({"prompt": f"w{number}"} for number in range(2))
        raise AssertionError("read too far")

    from datasets import IterableDataset

    trainer = make_trainer(
        make_config(tmp_path, eval_size=2), eval_dataset=IterableDataset.from_generator(rows)
    )
    assert trainer.evaluate()["eval_num_prompts"] == 2


@pytest.mark.slow
def test_several_sets_are_measured_before_training_every_n_steps_and_at_the_end(tmp_path):
    config = make_config(tmp_path, eval_on_start=True, eval_strategy="steps", eval_steps=2)
    trainer = make_trainer(config, eval_dataset={"a": HELD_OUT, "b": ROWS})
    trainer.train()
    assert [(e["step"], e["name"], e["dataset"]) for e in evaluations_of(config)] == [
        (step, name, dataset)
        for step, name in ((0, "start"), (2, "during"), (4, "end"))
        for dataset in ("a", "b")
    ]
    logged = [e for e in trainer.state.log_history if "eval_a_reward" in e]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    assert all("eval_b_reward" in entry for entry in logged)
    assert trainer.evaluate()["eval_a_reward"] == logged[-1]["eval_a_reward"]


def test_one_completion_a_prompt_is_measured(tmp_path):
    config = make_config(tmp_path, num_generations_eval=1, eval_kwargs={"pass_threshold": 2.0})
    seen = []

    def reward(completions, **_):
        seen.append(list(completions))
        return count_words(completions)

    metrics = make_trainer(config, reward, eval_dataset=HELD_OUT).evaluate()
    sampled, greedy = (count_words(completions) for completions in seen)
    assert (metrics["eval_num_samples"], len(sampled), len(greedy)) == (1, 3, 3)
    assert metrics["eval_reward"] == sum(sampled) / 3
    assert metrics["eval_pass@1"] == sum(score >= 2 for score in sampled) / 3
    assert metrics["eval_pass@1_greedy"] == sum(score >= 2 for score in greedy) / 3


@pytest.mark.slow
def test_epochs_are_what_evaluations_and_checkpoints_can_follow(tmp_path):
    config = make_config(
        tmp_path,
        max_steps=-1,
        num_train_epochs=2.5,
        num_prompts=5,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    trainer = make_trainer(config, eval_dataset=HELD_OUT)  # 12 rows: passes end in steps 3 and 5
    trainer.train()
    assert trainer.state.global_step == 6
    assert [e["step"] for e in evaluations_of(config)] == [3, 5, 6]
    saved = sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-5", "checkpoint-6"]


# -- callbacks ------------------------------------------------------------------------------------


class Diary(transformers.TrainerCallback):
    """Writes down what it is told of, and in which step."""

    def __init__(self):
        self.entries = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def write(args, state, control, **details):
            assert details["model"] is not None and details["optimizer"] is not None
            self.entries.append((name[3:], state.global_step))

        return write


def test_callbacks_are_told_of_every_event_in_trainers_order(tmp_path):
    diary = Diary()
    config = make_config(
        tmp_path,
        num_prompts=6,
        max_steps=3,
        logging_steps=2,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
    )
    trainer = make_trainer(config, eval_dataset=HELD_OUT, callbacks=[diary])
    assert diary.entries == [("init_end", 0)]
    trainer.train()
    step = ["pre_optimizer_step", "optimizer_step"]
    assert diary.entries[1:] == [
        ("train_begin", 0),
        ("log", 0),
        ("evaluate", 0),
        ("epoch_begin", 0),
        ("step_begin", 0),
        *((event, 0) for event in step),
        ("step_end", 1),
        ("step_begin", 1),
        *((event, 1) for event in step),
        ("step_end", 2),
        ("log", 2),
        ("log", 2),
        ("evaluate", 2),
        ("epoch_end", 2),
        ("save", 2),
        ("epoch_begin", 2),
        ("step_begin", 2),
        *((event, 2) for event in step),
        ("step_end", 3),
        ("log", 3),
        ("evaluate", 3),
        ("epoch_end", 3),
        ("save", 3),
        ("log", 3),
        ("train_end", 3),
    ]


class Wish(transformers.TrainerCallback):
    """Sets a flag at the end of step 2."""

    def __init__(self, flag):
        self.flag = flag

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            setattr(control, self.flag, True)


@pytest.mark.slow
def test_flags_that_callbacks_set_are_followed(tmp_path):
    def run(flag, **options):
        config = make_config(tmp_path / flag, save_strategy="no", max_steps=6, **options)
        trainer = make_trainer(config, eval_dataset=HELD_OUT, callbacks=[Wish(flag)])
        trainer.train()
        return trainer, Path(config.output_dir)

    _, folder = run("should_save")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    trainer, _ = run("should_evaluate")
    assert [row["step"] for row in evaluations_of(trainer.args)] == [2]
    trainer, _ = run("should_log")
    assert [entry["step"] for entry in trainer.state.log_history] == [2, 6]
    trainer, folder = run("should_training_stop")
    assert trainer.state.global_step == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert equal(weights(trainer), dict(model.named_parameters()))
    with pytest.raises(ValueError, match="a callback set should_epoch_stop"):
        run("should_epoch_stop")
    config = make_config(tmp_path / "no_set")
    with pytest.raises(ValueError, match=r"asked for .* nothing to evaluate on"):
        make_trainer(config, callbacks=[Wish("should_evaluate")]).train()


@pytest.mark.slow
def test_what_is_asked_for_in_the_middle_of_a_rollout_happens_at_its_end(tmp_path):
    config = make_config(tmp_path, save_strategy="no", num_iterations=3, max_steps=6)
    make_trainer(config, callbacks=[Wish("should_save")]).train()
    assert [p.name for p in Path(config.output_dir).glob("checkpoint-*")] == ["checkpoint-3"]
    stopped = make_config(tmp_path / "stopped", num_iterations=3, max_steps=6)
    trainer = make_trainer(stopped, callbacks=[Wish("should_training_stop")])
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_callbacks_are_added_removed_and_taken_out(tmp_path):
    class Other(Diary):
        pass

    trainer = make_trainer(make_config(tmp_path, max_steps=1), callbacks=[Diary])
    other = Other()
    trainer.add_callback(other)
    trainer.add_callback(transformers.PrinterCallback)
    first = trainer.pop_callback(Diary)
    assert type(first) is Diary
    trainer.remove_callback(transformers.PrinterCallback)
    assert trainer.pop_callback(transformers.PrinterCallback) is None
    trainer.train()
    assert first.entries == [("init_end", 0)]
    assert other.entries[0] == ("train_begin", 0) and other.entries[-1] == ("train_end", 1)
    trainer.remove_callback(other)
    assert other not in trainer.callback_handler.callbacks


@pytest.mark.slow
def test_tensorboard_has_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(
        tmp_path,
        report_to="tensorboard",
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer = make_trainer(config, eval_dataset=HELD_OUT)
    trainer.train()
    (folder,) = Path(config.output_dir, "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("train/reward")]
    rows = [row["reward"] for row in metrics_of(config)]
    assert rewards == [
        (2, pytest.approx((rows[0] + rows[1]) / 2)),
        (4, pytest.approx((rows[2] + rows[3]) / 2)),
    ]
    measured = [(event.step, event.value) for event in events.Scalars("eval/reward")]
    assert measured == [(e["step"], pytest.approx(e["reward"])) for e in evaluations_of(config)]
    assert events.Scalars("train/train_loss")


# -- the best model -------------------------------------------------------------------------------


def scripted(values):
    """A reward that is constant in evaluations, one value after the other, and counts in training:
    evaluations score 3 prompts once, sampled and then greedy."""
    calls = iter(value for value in values for _ in range(2))

    def reward(completions, **_):
        if len(completions) == 3:
            return [next(calls)] * 3
        return count_words(completions)

    return reward


def make_scored(tmp_path, values, *, callbacks=(), **options):
    defaults = {
        "max_steps": 6,
        "num_generations_eval": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
    }
    config = make_config(tmp_path, **{**defaults, **options})
    return make_trainer(config, scripted(values), eval_dataset=HELD_OUT, callbacks=callbacks)


def checkpoints_of(trainer) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


@pytest.mark.slow
def test_early_stopping_on_the_evaluations_reward(tmp_path):
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_scored(tmp_path, [1.0, 3.0, 2.0, 2.5, 9.0, 9.0], callbacks=[stopper])
    trainer.train()
    assert trainer.state.global_step == 4
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (3.0, 2)
    summary = json.loads(Path(trainer.args.output_dir, "summary.json").read_text())
    assert (summary["status"], summary["end"]["reward"]) == ("finished", 2.5)


@pytest.mark.slow
def test_patience_is_not_forgotten_by_resuming(tmp_path):
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    first = make_scored(tmp_path, [3.0, 2.0, 1.0], callbacks=[stopper])
    train_until_power_cut(first)
    again = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    second = make_scored(tmp_path, [1.0, 9.0, 9.0, 9.0], callbacks=[again])
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 3
    assert (second.state.best_metric, second.state.best_global_step) == (3.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path, strategy):
    kept = {}

    class Keep(transformers.TrainerCallback):
        def on_save(self, args, state, control, model, **kwargs):
            kept[state.global_step] = {n: p.detach().clone() for n, p in model.named_parameters()}

    trainer = make_scored(
        tmp_path,
        [1.0, 4.0, 3.0, 2.0, 4.0, 3.0, 4.0],  # the last: of the model that was loaded
        callbacks=[Keep],
        load_best_model_at_end=True,
        save_strategy=strategy,
        save_total_limit=1,
    )
    trainer.train()
    state, folder = trainer.state, Path(trainer.args.output_dir)
    assert (state.best_metric, state.best_global_step) == (4.0, 2)
    assert state.best_model_checkpoint == str(folder / "checkpoint-2")
    saved = {"steps": ["checkpoint-2", "checkpoint-6"], "best": ["checkpoint-2"]}
    assert checkpoints_of(trainer) == saved[strategy]
    assert sorted(kept) == {"steps": [1, 2, 3, 4, 5, 6], "best": [1, 2]}[strategy]
    assert equal(weights(trainer), kept[2])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert equal(kept[2], dict(model.named_parameters()))
    last = evaluations_of(trainer.args)[-1]
    assert (last["step"], last["name"], last["reward"]) == (2, "best", 4.0)
    assert any(
        note.startswith("the model is that of checkpoint-2") for note in trainer.monitor.notes
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["end"]["reward"] == 4.0


@pytest.mark.slow
def test_the_best_is_kept_where_checkpoints_fall_between_evaluations(tmp_path):
    options = {"eval_steps": 2, "save_steps": 3, "load_best_model_at_end": True}
    trainer = make_scored(tmp_path, [1.0, 4.0, 3.0, 4.0], **options)
    assert trainer.args.load_best_model_at_end
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (4.0, 4)
    assert checkpoints_of(trainer) == [f"checkpoint-{step}" for step in (2, 3, 4, 6)]
    assert evaluations_of(trainer.args)[-1]["name"] == "best"


@pytest.mark.slow
def test_a_resumed_run_knows_the_best_checkpoint(tmp_path):
    options = {"load_best_model_at_end": True, "save_total_limit": 2}
    first = make_scored(tmp_path, [4.0, 1.0, 2.0, 4.0], max_steps=3, **options)
    first.train()
    best = weights(first)
    second = make_scored(tmp_path, [3.0, 2.0, 4.0], max_steps=5, **options)
    second.train(resume_from_checkpoint=True)
    assert (second.state.best_metric, second.state.best_global_step) == (4.0, 1)
    assert checkpoints_of(second) == ["checkpoint-1", "checkpoint-5"]
    assert equal(weights(second), best)


@pytest.mark.slow
def test_less_can_be_better(tmp_path):
    trainer = make_scored(
        tmp_path,
        [2.0, 1.0, 3.0, 1.0],
        max_steps=3,
        metric_for_best_model="eval_reward",
        greater_is_better=False,
        load_best_model_at_end=True,
    )
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)


@pytest.mark.slow
def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path):
    named = {"metric_for_best_model": "eval_accuracy"}
    with pytest.raises(
        ValueError, match=r"eval_accuracy, which no evaluation has; .*pass@1, pass@"
    ):
        make_scored(tmp_path, [1.0] * 6, **named)

    def logs(completions, **given):
        given["log_metric"]("other", 1.0)
        return [1.0] * len(completions)

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", **named}
    trainer = make_trainer(make_config(tmp_path / "logs", **options), logs, eval_dataset=HELD_OUT)
    with pytest.raises(ValueError, match=r"has no metric eval_accuracy; it has .*eval_pass@1"):
        trainer.train()
    config = make_config(
        tmp_path / "sets", eval_strategy="steps", eval_steps=1, save_strategy="best"
    )
    with pytest.raises(
        ValueError, match="sets are a, b; prefix it with one of them, as in a_reward"
    ):
        make_trainer(config, eval_dataset={"a": HELD_OUT, "b": ROWS})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_best_model_at_end": True}, "eval_strategy is no"),
        ({"save_strategy": "best"}, "eval_strategy is no"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "no"},
            "save_strategy is no",
        ),
        (
            {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "loss"},
            "an evaluation computes no loss",
        ),
    ],
    ids=str,
)
def test_a_best_model_that_could_not_be_known_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RLOOConfig("out", **options)


# -- the card and the hub -------------------------------------------------------------------------


class Upload(Future):
    """Notes, when it is waited for, whether its folder is still there."""

    waits: ClassVar[list] = []

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def exception(self, timeout=None):
        self.waits.append(self.folder.exists())
        return super().exception(timeout)


class FakeApi:
    """Remembers what would be uploaded: name of the file and its content."""

    calls: ClassVar[list] = []
    fails = False

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo_id, *, private=None, exist_ok=False):
        assert exist_ok
        self.calls.append(("repo", repo_id, private, self.token))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, repo_id, *, branch, exist_ok):
        self.calls.append(("branch", repo_id, branch))

    def upload_folder(self, *, folder_path, ignore_patterns, run_as_future, **details):
        from huggingface_hub.utils import filter_repo_objects

        names = [str(p.relative_to(folder_path)) for p in folder_path.rglob("*") if p.is_file()]
        names = list(filter_repo_objects(names, ignore_patterns=ignore_patterns))
        content = {name: (folder_path / name).read_bytes() for name in names}
        self.calls.append(("upload", details, content))
        if not run_as_future:
            return "commit"
        future = Upload(folder_path)
        if self.fails:
            future.set_exception(ConnectionError("no route"))
        else:
            future.set_result("commit")
        return future


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "calls", [])
    monkeypatch.setattr(FakeApi, "fails", False)
    monkeypatch.setattr(Upload, "waits", [])
    return FakeApi


def uploads(hub):
    return [call[1:] for call in hub.calls if call[0] == "upload"]


MODEL_FILES = {"model.safetensors", "config.json", "tokenizer.json", "README.md", "config.yaml"}


@pytest.mark.slow
def test_a_push_that_failed_is_made_by_the_same_command(tmp_path, hub):
    options = {"push_to_hub": True, "hub_model_id": "me/words", "hub_strategy": "end"}
    hub.upload_folder, upload = None, hub.upload_folder
    with pytest.raises(TypeError):
        make_trainer(make_config(tmp_path, **options)).train()
    hub.upload_folder = upload
    for pushes in (1, 1):  # and not again
        make_trainer(make_config(tmp_path, **options)).train("auto")
        assert len(uploads(hub)) == pushes


def test_pushing_uploads_model_card_and_records_but_no_checkpoint(tmp_path, hub):
    trainer = make_trainer(make_config(tmp_path, hub_model_id="me/words", hub_private_repo=True))
    trainer.train()
    assert hub.calls == []
    assert trainer.push_to_hub(dataset_name="me/prompts", token="given") == "commit"
    assert hub.calls[0] == ("repo", "me/words", True, "given")
    ((details, content),) = uploads(hub)
    assert details["repo_id"] == trainer.hub_model_id == "me/words"
    assert details["commit_message"] == "End of training"
    assert MODEL_FILES | {"metrics.jsonl", "summary.json"} <= content.keys()
    assert not any("checkpoint" in name for name in content)
    saved = Path(trainer.args.output_dir, "model.safetensors").read_bytes()
    assert content["model.safetensors"] == saved
    assert b"datasets:\n- me/prompts" in content["README.md"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "places"),
    [
        ("end", []),
        ("every_save", [None, None]),
        ("checkpoint", [None, "last-checkpoint"] * 2),
        ("all_checkpoints", [None, "checkpoint-2", None, "checkpoint-4"]),
    ],
)
def test_pushes_while_training_follow_the_strategy(tmp_path, hub, strategy, places):
    config = make_config(
        tmp_path,
        push_to_hub=True,
        hub_strategy=strategy,
        hub_revision="dev",
        save_steps=2,
        save_total_limit=1,
    )
    trainer = make_trainer(config)
    trainer.train()
    assert hub.calls[:2] == [("repo", "run", None, None), ("branch", "me/run", "dev")]
    pushed = uploads(hub)
    assert [details["path_in_repo"] for details, _ in pushed] == [*places, None]
    assert all(details["revision"] == "dev" for details, _ in pushed)
    assert Upload.waits == [True] * len(places)  # before save_total_limit removes what is read
    assert pushed[-1][0]["commit_message"] == "End of training"
    for (details, content), place in zip(pushed, places, strict=False):
        step = details["commit_message"].split("step ")[1][0]
        assert step in "24"
        if place is None:
            assert content.keys() >= MODEL_FILES and "metrics.jsonl" not in content
        else:
            assert "optimizer.safetensors" in content


@pytest.mark.slow
def test_a_push_that_fails_on_the_way_is_noted_and_training_goes_on(tmp_path, hub, monkeypatch):
    monkeypatch.setattr(hub, "fails", True)
    trainer = make_trainer(make_config(tmp_path, push_to_hub=True, save_steps=2))
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.monitor.notes.count("a push to the hub failed: no route") == 1


def test_a_repository_that_cannot_be_made_is_found_before_sampling(tmp_path, hub, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise ConnectionError("no such user")

    monkeypatch.setattr(hub, "create_repo", refuse)

    def never(completions, **_):
        raise AssertionError("sampled")

    with pytest.raises(ConnectionError, match="no such user"):
        make_trainer(make_config(tmp_path, push_to_hub=True), never).train()


@pytest.mark.slow
def test_the_token_is_used_and_written_nowhere(tmp_path, hub):
    config = make_config(tmp_path, push_to_hub=True, hub_token="hf_secret", save_steps=2)
    trainer = make_trainer(config)
    trainer.train()
    assert hub.calls[0][3] == "hf_secret"
    for path in Path(config.output_dir).rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path
    assert "hf_secret" not in repr(config) + str(config) + render_resolved(config)
    assert config.to_dict()["hub_token"] is None and config.hub_token == "hf_secret"
    make_trainer(RLOOConfig(**{**config.to_dict(), "hub_token": "hf_other", "max_steps": 5})).train(
        resume_from_checkpoint=True
    )


def test_the_card_states_what_was_trained_and_how(tmp_path):
    config = make_config(tmp_path, num_generations=4, beta=0.05, hub_model_id="me/words")
    model = make_model("qwen3")
    model.name_or_path = "someone/base"
    trainer = RLOOTrainer(
        model, count_words, config, ROWS, processing_class=make_tokenizer(), eval_dataset=HELD_OUT
    )
    trainer.create_model_card(dataset_name="me/prompts", tags="words")
    card = Path(config.output_dir, "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "base_model": "someone/base",
        "datasets": ["me/prompts"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rloo", "words"],
    }
    for line in (
        "# words",
        "someone/base fine-tuned with REINFORCE Leave-One-Out on me/prompts.",
        "- Completions per prompt: 4",
        "- KL coefficient: 0.05",
        "- Rewards: count_words",
    ):
        assert line in text.split("\n")
    assert "mean of the other" in text and "2402.14740" in text
    assert f"transformers {transformers.__version__}" in text


def test_the_card_names_no_folder_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "base"
    make_model("qwen3").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rows = tmp_path / "rows.jsonl"
    ROWS.to_json(rows)
    config = make_config(tmp_path, model=str(folder), dataset=str(rows), max_steps=1)
    RLOOTrainer(reward_funcs=count_words, args=config).train()
    card = Path(config.output_dir, "README.md").read_text()
    assert str(tmp_path) not in card
    assert "base fine-tuned with REINFORCE Leave-One-Out on rows.jsonl." in card
    assert "base_model" not in card and "datasets" not in card


def test_a_readme_of_the_users_is_left_as_it_was(tmp_path):
    config = make_config(tmp_path, max_steps=1)
    folder = Path(config.output_dir)
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    trainer = make_trainer(config)
    trainer.train()
    assert (folder / "README.md").read_text() == "mine"
    assert any(note.startswith("README.md in output_dir is not") for note in trainer.monitor.notes)


# -- what scripts use beside training -------------------------------------------------------------


def test_metrics_and_state_are_printed_logged_and_saved_as_with_trainer(tmp_path, capsys):
    trainer = make_trainer(make_config(tmp_path, max_steps=1), eval_dataset=HELD_OUT)
    result = trainer.train()
    assert result.metrics["epoch"] == trainer.state.epoch
    trainer.log_metrics("train", result.metrics)
    measured = trainer.evaluate()
    trainer.log_metrics("eval", measured)
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", {**measured, "eval_nothing": float("nan")})
    trainer.save_state()
    shown, folder = capsys.readouterr().out, Path(trainer.args.output_dir)
    assert "***** train metrics *****" in shown and "eval_reward" in shown
    whole = json.loads((folder / "all_results.json").read_text())
    assert whole["train_loss"] == result.training_loss and whole["eval_nothing"] is None
    assert whole["eval_pass@1_interval"] == list(measured["eval_pass@1_interval"])
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 1 and state["log_history"] == trainer.state.log_history
    trainer.log({"mine": 0.5})
    assert trainer.state.log_history[-1] == {"mine": 0.5, "epoch": trainer.state.epoch, "step": 1}
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()
    assert not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def test_the_reference_the_callbacks_and_the_names_of_rewards_are_where_trl_has_them(tmp_path):
    stop = transformers.EarlyStoppingCallback()
    trainer = make_trainer(make_config(tmp_path), callbacks=[stop])
    assert trainer.ref_model is not trainer.model
    assert equal(dict(trainer.ref_model.named_parameters()), weights(trainer))
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert stop in trainer.callback_handler.callbacks
    assert trainer.reward_func_names == ["count_words"]
    assert make_trainer(make_config(tmp_path, beta=0.0)).ref_model is None


def test_a_callback_reads_the_options_of_the_run(tmp_path):
    seen = {}

    class Reader(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.update(beta=args.beta, k=args.num_generations, device=args.device.type)

    make_trainer(make_config(tmp_path, max_steps=1, use_cpu=True), callbacks=[Reader]).train()
    assert seen == {"beta": 0.05, "k": 4, "device": "cpu"}


@pytest.mark.slow
def test_an_attention_by_name_has_no_effect_unless_nothing_is_packed(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")

    def load(named: str | None, **options) -> str:
        kwargs = {"attn_implementation": named, "dtype": None, "revision": None}
        config = make_config(tmp_path, model_init_kwargs=kwargs, **options)
        trainer = RLOOTrainer(str(tmp_path / "tiny"), count_words, config, ROWS)
        assert trainer.model.dtype == torch.float32
        return trainer.policy.model.config._attn_implementation

    packed = load(None)
    with pytest.warns(UserWarning, match="attn_implementation flash_attention_2, which has no eff"):
        assert load("flash_attention_2") == packed
    assert load("eager", packing=False, rollout_engine="hf") == "eager"


def test_a_model_that_samples_nothing_is_refused(tmp_path):
    config = make_model("qwen3").config
    config.num_labels = 1
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match=r"model is a Qwen3ForSequenceClassification; .*causal"):
        RLOOTrainer(classifier, count_words, make_config(tmp_path), ROWS, None, make_tokenizer())


def test_an_error_in_an_evaluation_set_names_the_set(tmp_path):
    def compare(completions, answer):
        return [0.0] * len(completions)

    rows = Dataset.from_dict({"prompt": ["w1", "w2"], "answer": ["w3", "w4"]})
    config = make_config(tmp_path)
    for given, name in ((HELD_OUT, "the evaluation set"), ({"hard": HELD_OUT}, "hard")):
        with pytest.raises(ValueError, match=f"in {name}: the reward function 'compare' requires"):
            make_trainer(config, reward=compare, rows=rows, eval_dataset=given)
