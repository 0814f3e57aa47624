"""Executes the run of a case."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from benchmarks.broken_runs.cases import BASE, Case


def run(case: Case, folder: Path) -> None:
    """Execute the run of a case in an empty folder."""
    from rloo import RLOOConfig, RLOOTrainer

    rewards = [_loaded(reward) for reward in case.reward]
    if case.dies:
        rewards = [*rewards[:-1], _dying(rewards[-1])]
    trainer = RLOOTrainer(
        reward_funcs=rewards,
        args=RLOOConfig(**options_of(case, folder)),
        processing_class=_talkative(case.template) if case.template else None,
    )
    if case.hook is not None:
        case.hook(trainer)
    with contextlib.suppress(*([Exception] if case.dies else [])):
        trainer.train()
    if case.dies:  # as after a SIGKILL
        (folder / "summary.json").unlink(missing_ok=True)


def _talkative(template: str) -> Any:
    """The tokenizer of the embedded model with a chat template."""
    from transformers import AutoTokenizer

    from rloo.data.tasks.countdown import base_model_path

    tokenizer = AutoTokenizer.from_pretrained(base_model_path())
    tokenizer.chat_template = template
    return tokenizer


def options_of(case: Case, folder: Path) -> dict[str, Any]:
    """All options of a case. If the case needs a changed dataset, it is written to the folder."""
    options = {**BASE, "output_dir": str(folder), "seed": case.seed, **case.options}
    return options if case.prompt is None else options | _written(case, folder)


def _written(case: Case, folder: Path) -> dict[str, Any]:
    """Write a dataset with changed prompts."""
    from rloo.data.tasks.countdown import make_problems

    assert case.prompt is not None
    rows = make_problems("train")[case.seed : case.seed + 64]
    changed = [{**row, "prompt": case.prompt(row)} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))
    return {"dataset": str(path), "eval_split": None, "eval_on_start": False}


def _loaded(reward: Any) -> Any:
    from rloo.rewards.registry import load_reward

    return load_reward(reward)


def _dying(reward: Any, calls: int = 8) -> Any:
    """A reward that ends the run after `calls` calls."""
    left = [calls]

    def dies(completions: list[str], numbers: Any, target: Any, **_: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("as if the machine had been switched off")
        return reward(completions, numbers=numbers, target=target)

    return dies
