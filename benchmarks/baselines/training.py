"""One training run of an arm: its learning curve, and held-out answers before and after training.

The run uses the trainer of the package unchanged. Only the held-out evaluation is done here, since
intervals over several runs need the figure of every prompt.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset

from benchmarks.baselines.arms import Job, Task
from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.rank_rollout import RewardScorer
from rloo.data.prompt_dataset import PromptDataset
from rloo.tracking.jsonl import versions
from rloo.trainer.build import make_source, prompt_limit
from rloo.trainer.evaluate import evaluate, settings_of
from rloo.types import Prompt

# Name of a curve -> the metric of each step.
CURVES = {
    "reward": "reward",
    "length": "completions/mean_length",
    "kl": "kl/sequence",
    "signal": "groups/signal",
    "grad_norm": "grad_norm",
}


def make_trainer(task: Task, options: Mapping[str, Any], *, out: Path, folder: Path) -> RLOOTrainer:
    """A trainer of the task's base model. The trainer writes to `folder`."""
    return RLOOTrainer(
        model=task.model(out),
        reward_funcs=[task.reward],
        args=RLOOConfig(output_dir=str(folder), **options),
        train_dataset=Dataset.from_list(task.rows("train")),
    )


def run_training(task: Task, job: Job, *, out: Path) -> dict[str, Any]:
    """The result of a run: `curves` by step; `start` and `end` (see `_measure`) if the job is
    evaluated; total seconds, and versions."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        trainer = make_trainer(task, job.options, out=out, folder=folder)
        prompts = _heldout_prompts(task, trainer) if job.heldout else []
        result: dict[str, Any] = {}
        if job.heldout:
            result["start"] = _measure(trainer, prompts)
        trainer.train()
        if job.heldout:
            result["end"] = _measure(trainer, prompts)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    result["curves"] = {
        name: [_rounded(step.get(metric)) for step in steps] for name, metric in CURVES.items()
    }
    seconds = round(time.perf_counter() - began, 1)
    return result | {"seconds": seconds, "versions": versions()}


def _heldout_prompts(task: Task, trainer: RLOOTrainer) -> Sequence[Prompt]:
    source = make_source(
        Dataset.from_list(task.rows("heldout")),
        "train",
        tokenizer=trainer.processing_class,
        rewards=trainer.rewards,
        args=trainer.args,
        limit=prompt_limit(trainer.model, trainer.args, evaluation=True),
    )
    assert isinstance(source, PromptDataset)  # rows in a list are no iterable dataset
    return source.all_prompts(None)


def _measure(trainer: RLOOTrainer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """For each prompt, the share of sampled answers with the full reward, and the mean reward of
    sampled answers. Over all prompts, the share of greedy answers with the full reward."""
    policy = trainer.policy
    trainer.engine.load(policy.weights, policy.version)
    metrics, groups = evaluate(
        trainer.engine,
        prompts,
        RewardScorer(trainer.rewards, policy.tokenizer, trainer.world),
        replace(settings_of(policy), pass_threshold=1.0, pass_k=(1,)),
    )
    rewards = [[reward or 0.0 for reward in group.rewards] for group in groups]
    return {
        "passed": [fmean(reward >= 1.0 for reward in some) for some in rewards],
        "reward": [round(fmean(some), 4) for some in rewards],
        "greedy": metrics["pass@1_greedy"],
        "length": metrics["completions/mean_length"],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
