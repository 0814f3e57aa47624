"""Runs of a small policy on twelve prompts, and what they leave behind."""

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.stop_signals import ForcedInterrupt
from support.models import make_model
from support.text import WORDS, make_tokenizer

ROWS = Dataset.from_dict({"prompt": [" ".join(WORDS[i : i + 3 + i % 4]) for i in range(12)]})


def count_words(completions, **_):
    """How many of the words are among w0 ... w19."""
    return [float(sum(int(word[1:]) < 20 for word in c.split())) for c in completions]


def make_config(folder: Path, **options) -> RLOOConfig:
    defaults = {
        "output_dir": str(folder / "run"),
        "bf16": False,
        "gradient_checkpointing": False,
        "num_generations": 4,
        "num_prompts": 3,
        "max_steps": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "beta": 0.05,
        "seed": 7,
        "disable_tqdm": True,
        "num_threads": 1,
    }
    return RLOOConfig(**{**defaults, **options})


def make_trainer(
    config: RLOOConfig, reward=count_words, rows=ROWS, model=None, **options
) -> RLOOTrainer:
    return RLOOTrainer(
        model=make_model("qwen3") if model is None else model,
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
        processing_class=make_tokenizer(),
        **options,
    )


def weights(trainer: RLOOTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def equal(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def identical(one, other) -> bool:
    """Equality to the last bit, of types too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(identical, one, other))
    return one == other


def metrics_of(config: RLOOConfig) -> list[dict]:
    lines = Path(config.output_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(rows: list[dict]) -> list[dict]:
    timed = ("time/", "step_time", "wall_time", "tokens_per")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]


class PowerCut(ForcedInterrupt):
    """Nothing can be saved any more."""


def train_until_power_cut(trainer: RLOOTrainer, after: int = 3) -> None:
    """Train, and lose everything but the checkpoints when step `after` has been recorded."""
    original = trainer.monitor.step

    def cut(step, metrics):
        original(step, metrics)
        if step == after:
            raise PowerCut

    trainer.monitor.step = cut
    with pytest.raises(PowerCut):
        trainer.train()


def train_with_failure(config: RLOOConfig, reward, rows, after: int = 3) -> RLOOTrainer:
    """Train until the reward fails, after so many rollouts, and resume. Returns the trainer of the
    resumed run."""
    calls = []

    def failing(prompts, completions, **columns):
        calls.append(1)
        if len(calls) > after:
            raise RuntimeError("no reward today")
        return reward(prompts=prompts, completions=completions, **columns)

    with pytest.raises(RuntimeError, match="no reward today"):
        make_trainer(config, failing, rows).train()
    resumed = make_trainer(config, reward, rows)
    resumed.train(resume_from_checkpoint=True)
    return resumed
