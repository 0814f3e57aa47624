"""Ways to train that must come to the same: one table of features, one test for each pair of ways.

To the last bit: a run that was resumed from its middle, and one that was never stopped; a run that
was evaluated at every step, and one that never was. But for rounding: updates packed and padded;
rollouts sampled by the native engine and by transformers. One process and several are compared in
tests/distributed/test_processes.py and, under DeepSpeed, in tests/peers/test_deepspeed.py."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rloo import RLOOTrainer
from rloo.data import iterable_dataset
from rloo.model.training_state import capture_rng
from rloo.rewards.running_norm import RunningNormReward
from rloo.trainer.checkpoint import load_checkpoint
from support.adapters import make_lora
from support.addons import needs_addons
from support.markers import every_second, in_pairs, slow
from support.models import make_model, make_wide
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    identical,
    make_config,
    make_trainer,
    metrics_of,
    weights,
    without_times,
)


def reward(completions, log_metric=None, **_):
    """Draws from every global generator, as rewards of users do."""
    noise = random.random() + np.random.rand() + torch.rand(()).item()
    if log_metric is not None:
        log_metric("noise", noise)
    return [noise + score for score in count_words(completions)]


def normalized():
    def score(prompts, completions):
        return reward(completions)

    return RunningNormReward(score)


def flat_in_half(prompts, completions, **_):
    """Without signal in groups of six of the twelve prompts."""
    flat = set(ROWS["prompt"][::2])
    scores = zip(prompts, reward(completions), strict=True)
    return [0.0 if prompt in flat else score for prompt, score in scores]


def qwen(folder: Path):
    return make_model("qwen3")


def experts(folder: Path):
    return make_model("qwen3_moe")


def wide(folder: Path):
    return make_wide()


def saved(folder: Path):
    """The path of a wide model, which is loaded in few bits."""
    if not folder.exists():
        make_wide().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True)
class Feature:
    """What is trained and how. `model` is given a folder that it may fill; `make_reward` makes a
    function without a past for every run."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[Path], Any] = qwen
    lora: dict[str, Any] | None = None
    rows: Any = ROWS
    make_reward: Callable[[], Any] = lambda: reward


def of_options(**options) -> Feature:
    return Feature(options)


HELD_OUT = {"a": ROWS.select(range(2)), "b": ROWS.select(range(3, 6))}
STREAM = ROWS.to_iterable_dataset().shuffle(seed=5, buffer_size=6)
FEATURES = {
    "full fine-tuning": Feature(),
    "no KL penalty": of_options(beta=0.0),
    "two passes over the data": of_options(num_prompts=5),
    "two steps a rollout": of_options(steps_per_generation=2),
    "two passes over a rollout": of_options(num_iterations=2),
    "token ratios": of_options(preset="areal", temperature=0.8),
    "entropy bonus": of_options(preset="grpo", entropy_coef=0.01, num_iterations=2),
    "normalised advantages": of_options(normalize_advantages=True),
    "batch statistics": of_options(preset="reinforce_pp_baseline", steps_per_generation=2),
    "running baseline": of_options(mean_level="running", num_generations=1, num_prompts=12),
    "running scale of rewards": of_options(normalize_rewards="running", preset="openrlhf"),
    "a reward's own scale": Feature(make_reward=normalized),
    "adaptive beta": of_options(kl_kwargs={"target": 0.05, "horizon": 24}, steps_per_generation=2),
    "moving reference": of_options(
        sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5
    ),
    "dynamic sampling": Feature(
        {"dynamic_sample": True, "steps_per_generation": 2}, make_reward=lambda: flat_in_half
    ),
    "problems by a curriculum": Feature(
        {
            "dataset": "gym:gcd,lcm",
            "dataset_kwargs": {"size": 8, "levels": [0, 1], "curriculum": True},
            "num_generations": 16,
            "eval_kwargs": {"pass_threshold": 2.0},
        },
        rows=None,
    ),
    "streaming dataset": Feature({"num_prompts": 5}, rows=STREAM),
    "streaming, two steps a rollout": Feature({"steps_per_generation": 2}, rows=STREAM),
    "checkpointing": of_options(gradient_checkpointing=True),
    "bfloat16": of_options(bf16=True),
    "mixture of experts": Feature({"router_aux_loss_coef": 0.1}, model=experts),
    "adafactor": of_options(optim="adafactor"),
    "adamw of 8 bits": Feature({"optim": "adamw_8bit"}, model=wide),
    "paged adamw": Feature({"optim": "paged_adamw_32bit"}, model=wide),
    "ademamix of 8 bits": Feature({"optim": "ademamix_8bit"}, model=wide),
    "LoRA": Feature(lora={}),
    "LoRA that begins at random": Feature(lora={"init_lora_weights": False}),
    "LoRA beside a head": Feature(lora={"modules_to_save": ["lm_head"]}),
    "DoRA": Feature(lora={"use_dora": True}),
    "base of 4 bits": Feature({"load_in_4bit": True, "optim": "adamw_8bit"}, saved, lora={}),
    "base of 8 bits": Feature({"load_in_8bit": True, "optim": "adamw_8bit"}, saved, lora={}),
}
if find_spec("reasoning_gym") is None:
    del FEATURES["problems by a curriculum"]
# Whose state is that of another feature, in another combination.
ALIKE = [
    "two passes over the data",
    "token ratios",
    "entropy bonus",
    "streaming, two steps a rollout",
    "checkpointing",
    "paged adamw",
    "ademamix of 8 bits",
    "LoRA beside a head",
    "base of 8 bits",
    "normalised advantages",
    "batch statistics",
    "a reward's own scale",
    "running scale of rewards",
    "bfloat16",
    "mixture of experts",
    "adafactor",
    "LoRA that begins at random",
    "DoRA",
]
# Where an evaluation could move what training goes on from: the features that carry a state of
# their own from step to step, or change what the policy or the engine is.
EVALUATED = [
    "full fine-tuning",
    "two passes over the data",
    "running baseline",
    "running scale of rewards",
    "a reward's own scale",
    "adaptive beta",
    "dynamic sampling",
    "streaming dataset",
    "bfloat16",
    "mixture of experts",
    "LoRA",
    "base of 4 bits",
]
# Where the forward pass, its gradient or the sampled weights are not those of the first feature.
ROUNDED = [
    "full fine-tuning",
    "no KL penalty",
    "two passes over a rollout",
    "token ratios",
    "checkpointing",
    "mixture of experts",
    "LoRA that begins at random",
    "DoRA",
    "base of 4 bits",
]
# Plain descent: its steps are as large as the gradient, and Adam's as large for rounding errors.
DESCENT = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(iterable_dataset, "BLOCK", 4)  # of the twelve rows
        yield tmp_path_factory.mktemp("equivalence")


@pytest.fixture(scope="module")
def make(root):
    """make(feature, folder, **options): a trainer of four steps that saves every second."""

    def make_feature(name: str, folder: Path, **more) -> RLOOTrainer:
        feature = FEATURES[name]
        config = make_config(folder, **{"save_steps": 2, **feature.options, **more})
        return make_trainer(
            config,
            feature.make_reward(),
            feature.rows,
            feature.model(root / "saved model"),
            eval_dataset=HELD_OUT if config.eval_on_start else None,
            peft_config=None if feature.lora is None else make_lora(**feature.lora),
        )

    return make_feature


@pytest.fixture(scope="module")
def plain(make, root):
    """plain(feature, **options): an undisturbed run's trainer and its traces; each is made once."""

    @cache
    def train(name: str, **options) -> tuple[RLOOTrainer, dict[str, Any]]:
        trainer = make(name, root / f"{name} {options}", **options)
        trainer.train()
        return trainer, traces(trainer)

    return train


def rows_of(trainer: RLOOTrainer, name: str) -> list[dict]:
    lines = Path(trainer.args.output_dir, name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def traces(trainer: RLOOTrainer) -> dict[str, Any]:
    """What a run leaves but its clock: in memory, in its files and in its last checkpoint."""
    folder = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
    saved = load_checkpoint(folder)
    kept = ("prompts", "rewards", "num_tokens", "adaptive", "scaler")
    state = {name: saved.trainer_state[name] for name in kept}
    state["prompts"].pop("stream", None)  # datasets notes how far it has read ahead
    return {
        "weights": weights(trainer),
        "generators": capture_rng(),
        "metrics": without_times(metrics_of(trainer.args)),
        "completions": rows_of(trainer, "completions.jsonl"),
        "optimizer": saved.optimizer,
        "scheduler": saved.scheduler,
        "rng": saved.rng,
        **state,
        **{str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")},
    }


def how_of(trainer: RLOOTrainer) -> dict[str, Any]:
    """What the run itself says of how it was made."""
    summary = json.loads(Path(trainer.args.output_dir, "summary.json").read_text())
    return {name: summary["config"][name] for name in ("packing", "rollout_engine")}


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of traces that are not the same to the last bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not identical(one[name], other[name])]


def case_of(name):
    if name == "problems by a curriculum":  # of reasoning-gym, which an add-on asks
        return pytest.param(name, marks=needs_addons)
    return slow(name) if name in ALIKE else name


@pytest.mark.parametrize("name", [case_of(name) for name in FEATURES])
def test_a_resumed_run_ends_as_the_uninterrupted_one(make, plain, tmp_path, name):
    whole, expected = plain(name)
    shutil.copytree(whole.args.output_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    resumed = make(name, tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert different(traces(resumed), expected) == []


def test_saving_changes_nothing(plain):
    assert different(plain("full fine-tuning", save_steps=4)[1], plain("full fine-tuning")[1]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", every_second(EVALUATED))
def test_evaluation_leaves_no_trace(make, plain, tmp_path, name):
    often = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    watched = make(name, tmp_path, num_generations_eval=1, **often)
    watched.train()
    assert len(rows_of(watched, "evaluations.jsonl")) >= 2 * 3  # at the start, on the way, the end
    assert different(traces(watched), plain(name)[1]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"), in_pairs(ROUNDED, [{"packing": False}, {"rollout_engine": "hf"}]), ids=str
)
def test_packing_and_the_engine_change_no_more_than_rounding(make, plain, tmp_path, name, other):
    usual, expected = plain(name, **DESCENT)
    trainer = make(name, tmp_path, **DESCENT, **other)
    before = weights(trainer)
    trainer.train()
    assert how_of(usual) == {"packing": True, "rollout_engine": "native"}
    assert how_of(trainer) == how_of(usual) | other
    found = traces(trainer)
    assert found["completions"] == expected["completions"]
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    way = max((expected["weights"][n] - before[n]).norm() for n in trained)
    assert way > 0.01
    for n in trained:
        assert (found["weights"][n] - expected["weights"][n]).norm() <= 1e-4 * way, n
