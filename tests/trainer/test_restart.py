"""The same script twice into one folder, and `train()` twice on one trainer."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from rloo import RLOOTrainer
from rloo.trainer.run_lock import locked
from support.training import equal, make_config, make_trainer, metrics_of, weights


class Stops(transformers.TrainerCallback):
    """Raises KeyboardInterrupt at the end of a step, once."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.step = None
            raise KeyboardInterrupt


def interrupted(config, step=2) -> RLOOTrainer:
    trainer = make_trainer(config, callbacks=[Stops(step)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


@pytest.mark.slow
def test_a_script_that_is_run_twice_keeps_both_runs(tmp_path, capsys):
    config = make_config(tmp_path, max_steps=2)
    first = make_trainer(config)
    first.train()
    run = Path(config.output_dir)
    before = {p.relative_to(run): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    capsys.readouterr()
    second = make_trainer(config)
    second.train()
    assert f"the run that was in {run} is now in {run / 'earlier' / '1'}" in capsys.readouterr().out
    kept = run / "earlier" / "1"
    del before[Path(".lock")]
    assert {p.relative_to(kept): p.read_bytes() for p in kept.rglob("*") if p.is_file()} == before
    assert equal(weights(first), weights(second))
    assert [row["step"] for row in metrics_of(config)] == [1, 2]


@pytest.mark.slow
def test_an_unfinished_run_that_was_moved_goes_on_as_the_line_says(tmp_path, capsys):
    whole = make_trainer(make_config(tmp_path / "whole"))
    whole.train()
    config = make_config(tmp_path)
    interrupted(config)
    capsys.readouterr()
    make_trainer(config).train()
    place = Path(config.output_dir, "earlier", "1")
    said = capsys.readouterr().out
    assert f"goes on with --output_dir {place} --resume_from_checkpoint auto" in said
    rest = make_trainer(make_config(tmp_path, output_dir=str(place)))
    assert rest.train("auto").global_step == 4
    assert equal(weights(rest), weights(whole))


@pytest.mark.slow
def test_training_again_begins_anew_with_the_weights_that_there_are(tmp_path):
    config = make_config(tmp_path, logging_steps=2)
    trainer = make_trainer(config)
    trainer.train()
    middle, drawn = weights(trainer), trainer._source.state_dict()["drawn"]
    moments = trainer.optimizer.state_dict()["state"][0]["step"].item()
    result = trainer.train()
    assert result.global_step == trainer.state.global_step == 4
    assert [row["step"] for row in metrics_of(config)] == [1, 2, 3, 4]
    assert [row["step"] for row in trainer.state.log_history] == [2, 4, 4]
    earlier = Path(config.output_dir, "earlier", "1")
    assert len((earlier / "metrics.jsonl").read_text().splitlines()) == 4
    assert trainer._source.state_dict()["drawn"] == 2 * drawn
    assert trainer.optimizer.state_dict()["state"][0]["step"].item() == 2 * moments
    assert metrics_of(config)[0]["learning_rate"] == config.learning_rate
    assert not equal(middle, weights(trainer))
    first = transformers.AutoModelForCausalLM.from_pretrained(earlier).state_dict()
    assert all(torch.equal(weight, first[name]) for name, weight in middle.items())


@pytest.mark.slow
@pytest.mark.parametrize("resume", [None, True, "auto"])
def test_training_again_after_an_interrupt_goes_on_to_the_last_bit(tmp_path, resume):
    whole = make_trainer(make_config(tmp_path / "whole"))
    whole.train()
    config = make_config(tmp_path)
    trainer = interrupted(config)
    trainer.train(resume)
    assert equal(weights(trainer), weights(whole))
    steps = [row["step"] for row in metrics_of(config)]
    for before, row in pairwise(metrics_of(config)):  # the time goes on where it stopped
        assert row["wall_time"] >= before["wall_time"] + row["step_time"]
    assert steps == [1, 2, 3, 4] and not Path(config.output_dir, "earlier").exists()
    assert [r["step"] for r in trainer.state.log_history] == [
        r["step"] for r in whole.state.log_history
    ]


def test_a_finished_run_that_is_asked_for_again_is_not_forgotten(tmp_path):
    trainer = make_trainer(make_config(tmp_path))
    history = trainer.train() and list(trainer.state.log_history)
    assert trainer.train("auto").global_step == 4
    assert trainer.state.log_history == history and trainer.state.global_step == 4


def test_a_folder_that_another_run_holds_is_refused_as_it_is(tmp_path):
    config = make_config(tmp_path, max_steps=1)
    trainer = make_trainer(config)
    trainer.train()
    with locked(Path(config.output_dir)), pytest.raises(ValueError, match="that is going on"):
        make_trainer(config).train()
    summary = json.loads(Path(config.output_dir, "summary.json").read_text())
    assert summary["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["args", "trainer.args"])
def test_a_notebook_asks_for_another_length_by_assignment(tmp_path, whose):
    seen = []

    class Sees(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **named):
            rate = named["lr_scheduler"].get_last_lr()[0]
            seen.append((args.max_steps, state.max_steps, state.global_step, round(rate, 9)))

    rate = {"learning_rate": 1e-3, "lr_scheduler_type": "linear"}
    config = make_config(tmp_path, max_steps=2, **rate)
    trainer = make_trainer(config, callbacks=[Sees()])
    args = config if whose == "args" else trainer.args
    args.max_steps = 1  # before the first, too
    assert trainer.train().global_step == 1 == trainer.args.max_steps
    args.max_steps = 4
    assert trainer.train().global_step == 4
    # A linear schedule of four steps falls by a quarter after each.
    assert seen[0] == (1, 1, 1, 0.0)
    falling = [0.00075, 0.0005, 0.00025, 0.0]
    assert seen[1:] == [(4, 4, step, rate) for step, rate in zip(range(1, 5), falling, strict=True)]
    assert trainer.lr_scheduler is trainer.policy.stepper.scheduler
    told = json.loads(Path(config.output_dir, "summary.json").read_text())
    assert (told["steps"], told["config"]["max_steps"]) == (4, 4)
    assert [row["step"] for row in metrics_of(config)] == [1, 2, 3, 4]
    args.num_train_epochs, args.max_steps = 1, -1
    rollouts = -(-len(trainer.train_dataset) // trainer.batches.prompts_per_rollout)
    assert trainer.train().global_step == rollouts * trainer.batches.steps_per_rollout
    with pytest.raises(ValueError, match="max_steps is 0; it must be at least 1, or -1"):
        args.max_steps = 0


@pytest.mark.slow
def test_a_longer_training_asked_for_goes_on_from_a_checkpoint(tmp_path):
    whole = make_trainer(make_config(tmp_path / "whole", lr_scheduler_type="constant"))
    whole.train()
    config = make_config(tmp_path, max_steps=2, save_steps=2, lr_scheduler_type="constant")
    trainer = make_trainer(config)
    trainer.train()
    config.max_steps = 4
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    assert equal(weights(trainer), weights(whole))


@pytest.mark.slow
def test_options_changed_for_another_trainer_are_refused_by_the_first(tmp_path):
    class Changes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            config.beta = 0.5

    config = make_config(tmp_path, max_steps=1, save_strategy="no")
    first = make_trainer(config)
    first.train()
    config.learning_rate = 0.5
    second = make_trainer(config)
    assert (first.args.learning_rate, second.args.learning_rate) == (0.01, 0.5)
    for act in (first.train, lambda: first.evaluate(first.train_dataset)):
        with pytest.raises(ValueError, match="learning_rate cannot be changed: these options"):
            act()
    second.train()
    config.learning_rate = 0.01  # as the first has it: but the second has not
    with pytest.raises(ValueError, match="learning_rate cannot be changed"):
        second.train()
    config.learning_rate = 0.5
    third = make_trainer(config, callbacks=[Changes()])
    with pytest.raises(ValueError, match="beta cannot be changed"):
        third.train()


def test_a_changed_generation_config_is_refused_as_nothing_reads_it(tmp_path):
    trainer = make_trainer(make_config(tmp_path, max_steps=1))
    trainer.generation_config.max_new_tokens = 2
    with pytest.raises(TypeError, match=r"generation_config was changed \(max_new_tokens\)"):
        trainer.train()
    trainer.generation_config.max_new_tokens = trainer.args.max_completion_length
    trainer.train()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("_metrics", "use log_metric"), ("predict", "use evaluate"), ("tokenizer", "use process"),
        ("_get_per_token_logps_and_entropies", "use the options of the objective"),
        ("hyperparameter_search", "use evaluate"), ("_get_learning_rate", "get_last_lr"),
    ],
)  # fmt: skip
def test_what_a_script_looks_for_in_vain_is_told_with_what_to_use(tmp_path, name, said):
    trainer = make_trainer(make_config(tmp_path, max_steps=1))
    with pytest.raises(AttributeError, match=said):
        getattr(trainer, name)
