"""What subclasses of TRL's trainer override is what a run uses, or is refused when it is made."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from rloo.trainer.trl_overrides import CALLED
from support.models import make_model
from support.text import make_tokenizer

ROWS = Dataset.from_list([{"prompt": f"w{n} w{n + 1}"} for n in range(4)])


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def make(folder: Path, trainer_class=RLOOTrainer, **options) -> RLOOTrainer:
    args = RLOOConfig(
        str(folder / "run"), num_prompts=2, num_generations=2, max_completion_length=4,
        max_steps=2, learning_rate=1e-2, bf16=False, gradient_checkpointing=False, num_threads=1,
        use_cpu=True, logging_steps=1, disable_tqdm=True, **options,
    )  # fmt: skip
    return trainer_class(
        make_model("qwen3"), length, args, ROWS, ROWS, processing_class=make_tokenizer()
    )


class Mine(RLOOTrainer):
    """As they are written for TRL."""

    def log(self, logs, start_time=None):
        super().log({**logs, "mine": 1.0}, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return {**metrics, f"{metric_key_prefix}_mine": float(self.state.global_step)}

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        Path(output_dir or self.args.output_dir, "mine.txt").write_text("mine")

    def create_optimizer(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def create_scheduler(self, num_training_steps, optimizer=None):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / num_training_steps)

    def is_world_process_zero(self):
        return False

    def create_model_card(self, *arguments, **options):
        super().create_model_card(tags=["mine"])


def test_a_run_calls_what_a_subclass_overrides(tmp_path):
    options = {"save_strategy": "best", "metric_for_best_model": "mine", "eval_strategy": "steps"}
    trainer = make(tmp_path, Mine, **options, eval_steps=1)
    trainer.train()
    run = tmp_path / "run"
    assert all(row["mine"] == 1.0 for row in trainer.state.log_history)
    assert trainer.state.best_metric == 2.0  # the number that `evaluate` added, at the last step
    assert len((run / "evaluations.jsonl").read_text().splitlines()) == 2
    for folder in (run, run / "checkpoint-1", run / "checkpoint-2"):
        assert (folder / "mine.txt").exists()
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.lr_scheduler.get_last_lr() == [0.25]
    assert not trainer.state.is_world_process_zero and trainer.state.is_local_process_zero
    assert "- mine" in (run / "README.md").read_text()


def test_functions_put_on_a_trainer_are_called(tmp_path):
    trainer, logged = make(tmp_path, save_strategy="no"), []
    trainer.log = lambda logs, start_time=None: logged.append(logs)
    trainer.train()
    assert "loss" in logged[0] and "train_loss" in logged[-1]
    assert trainer.state.log_history == []


def test_a_subclass_that_overrides_nothing_trains_to_the_same_bits(tmp_path):
    ends = []
    for name, kind in (("a", RLOOTrainer), ("b", type("Plain", (RLOOTrainer,), {}))):
        trainer = make(tmp_path / name, kind, eval_strategy="steps", eval_steps=1)
        trainer.train()
        rows = (tmp_path / name / "run" / "evaluations.jsonl").read_text().splitlines()
        ends.append(([json.loads(row)["reward"] for row in rows], trainer.model.state_dict()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(w, ends[1][1][name]) for name, w in ends[0][1].items())


def test_a_checkpoint_without_weights_is_refused(tmp_path):
    trainer = make(tmp_path, save_steps=1)
    trainer.save_model = lambda output_dir=None: Path(output_dir).mkdir(exist_ok=True)
    with pytest.raises(ValueError, match=r"has written no weights.*call super"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "seam"),
    [
        ("compute_loss", "estimator=my.py:function"),
        ("training_step", "estimator=my.py:function"),
        ("_generate_and_score_completions", "reward functions, which are given prompts"),
        ("_calculate_rewards", "a reward function"),
        ("get_train_dataloader", "train_dataset"),
        ("prediction_step", "evaluate, or eval_dataset"),
        ("get_optimizer_cls_and_kwargs", "create_optimizer and create_scheduler"),
        ("_save_checkpoint", "save_model, or a callback's on_save"),
        ("_maybe_log_save_evaluate", "a callback"),
    ],
)
def test_what_nobody_would_call_is_refused_with_what_to_use(tmp_path, name, seam):
    mixin = type("Mixin", (), {name: lambda self: None})
    for parents, methods in (((RLOOTrainer,), vars(mixin)), ((mixin, RLOOTrainer), {})):
        own = {n: method for n, method in methods.items() if n == name}
        with pytest.raises(TypeError, match=rf"has {name}, which would never be called; use .*"):
            type("Mine", parents, own)
    trainer = object.__new__(RLOOTrainer)
    with pytest.raises(TypeError, match=seam):
        setattr(trainer, name, lambda: None)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_that_is_changed_after_it_was_made_is_refused(tmp_path, monkeypatch, when):
    trainer = make(tmp_path) if when == "after" else None
    monkeypatch.setattr(RLOOTrainer, "compute_loss", lambda self: None, raising=False)
    with pytest.raises(TypeError, match="RLOOTrainer has compute_loss, which would never be call"):
        trainer.train() if trainer else make(tmp_path)


def test_what_is_replaced_on_the_class_itself_is_called(tmp_path, monkeypatch):
    def create_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    monkeypatch.setattr(RLOOTrainer, "create_optimizer", create_optimizer)
    assert isinstance(make(tmp_path).policy.stepper.optimizer, torch.optim.SGD)


def test_both_of_the_optimizer_and_the_names_that_decay_are_asked_for(tmp_path):
    class Both(RLOOTrainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.25)

    class Decays(RLOOTrainer):
        def get_decay_parameter_names(self, model):
            return [name for name in super().get_decay_parameter_names(model) if "embed" in name]

    assert make(tmp_path, Both).policy.stepper.learning_rate == 0.5
    decayed, others = make(tmp_path, Decays, weight_decay=0.1).optimizer.param_groups
    assert [tuple(p.shape) for p in decayed["params"]] == [(97, 32)]
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0


def test_a_trainer_that_has_its_optimizer_takes_no_function_to_make_it():
    with pytest.raises(TypeError, match="override it in a subclass, or pass optimizers="):
        object.__new__(RLOOTrainer).create_optimizer = lambda: None


@pytest.mark.parametrize(
    "name",
    ["optimizer", "train_dataset", "compute_metrics", "model", "beta", "num_generations",
     "generation_config"],
)  # fmt: skip
def test_what_nobody_would_read_any_more_is_refused(tmp_path, name):
    trainer = make(tmp_path)
    with pytest.raises(TypeError, match=f"{name} is put on a trainer that has been set up"):
        setattr(trainer, name, None)
    trainer.my_own = None


def test_what_is_put_back_is_no_replacement_and_loaders_have_a_length(tmp_path):
    trainer = make(tmp_path)
    trainer.model = trainer.model.to("cpu")
    trainer.args = trainer.args
    trainer.args.stage_of_mine = 2
    loader = trainer.get_train_dataloader()
    assert trainer.num_examples(loader) == len(loader.dataset) > 0
    with pytest.raises(AttributeError, match=r"predict.*evaluate\(rows\)"):
        trainer.predict(None)
    with pytest.raises(TypeError, match="model is put on a trainer"):
        trainer.model = torch.nn.Linear(1, 1)


def test_methods_of_ones_own_are_no_overrides():
    own = {name: lambda self: None for name in (*CALLED, "train", "my_helper", "add_callback")}
    assert issubclass(type("Mine", (RLOOTrainer,), own), RLOOTrainer)


def test_a_schedule_of_a_subclass_s_is_asked_for_again_for_another_length(tmp_path):
    lengths = []

    class Sets(RLOOTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            lengths.append(num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    trainer = make(tmp_path, Sets, save_strategy="no")
    first = trainer.lr_scheduler
    trainer.args.max_steps = 1
    assert trainer.train().global_step == 1
    assert lengths == [2, 1] and trainer.lr_scheduler is trainer.policy.stepper.scheduler
    assert trainer.lr_scheduler is not first
    with pytest.raises(TypeError, match="lr_scheduler is put on a trainer"):
        trainer.lr_scheduler = first
