"""The tasks on which the arms are compared. Each has three splits: "train", "tuning" and
"heldout"."""

from __future__ import annotations

import json
import random
import runpy
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.baselines import gym
from benchmarks.baselines.arms import Task
from rloo.data.tasks.countdown import (
    base_model_path,
    countdown_reward,
    list_attempts,
    make_problems,
)

NUM_TUNING = NUM_HELDOUT = 256
NUM_MIXED = 600
_LARGEST_TARGET = 380
_SMOLLM2 = Path(__file__).resolve().parents[2] / "examples" / "smollm2.py"


def countdown_rows(split: str) -> list[dict[str, Any]]:
    """Rows of Countdown. The rows of "tuning" are the last of the embedded training split."""
    if split == "heldout":
        return make_problems("heldout")[:NUM_HELDOUT]
    rows = make_problems("train")
    return rows[-NUM_TUNING:] if split == "tuning" else rows[:-NUM_TUNING]


@cache
def mixture_rows(split: str) -> list[dict[str, Any]]:
    """Countdown as a mixture whose difficulty the text tells. The column `level` tells the kind of
    a training prompt, a third each: "open" (a usual problem), "none" (the target is larger than any
    product of two of the numbers) and "any" (the target is 0, which stands for any answer).
    Held-out rows are usual problems: the others measure nothing."""
    return _mixed(split, _told_target)


@cache
def hidden_rows(split: str) -> list[dict[str, Any]]:
    """As `mixture_rows`, but the text tells nothing: the target of "none" is any number that no
    attempt reaches, and a problem of "any" looks as a usual one."""
    return _mixed(split, _hidden_target)


def _mixed(
    split: str, target_of: Callable[[dict[str, Any], random.Random], int]
) -> list[dict[str, Any]]:
    rows = countdown_rows(split)
    if split != "train":
        return rows
    rng = random.Random(0)
    small = [row for row in rows if _largest(row) < _LARGEST_TARGET]
    mixed = [dict(row, level=level) for row, level in zip(small, _levels(), strict=False)]
    for row in mixed:
        if row["level"] != "open":
            row["target"] = target_of(row, rng)
            numbers = " ".join(map(str, row["numbers"]))
            row["prompt"] = f"{numbers} -> {row['target']} :"
    rng.shuffle(mixed)
    return mixed


def _told_target(row: dict[str, Any], rng: random.Random) -> int:
    return 0 if row["level"] == "any" else rng.randint(_largest(row) + 1, _LARGEST_TARGET)


def _hidden_target(row: dict[str, Any], rng: random.Random) -> int:
    if row["level"] == "any":
        return int(row["target"])
    reached = {attempt.value for attempt in list_attempts(row["numbers"])}
    return rng.choice([n for n in range(1, _LARGEST_TARGET + 1) if n not in reached])


def _largest(row: dict[str, Any]) -> int:
    return max(attempt.value for attempt in list_attempts(row["numbers"]))


def _levels() -> list[str]:
    return ["open", "none", "any"] * (NUM_MIXED // 3)


def mixture_reward(
    completions: Sequence[str],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    level: Sequence[str] | None = None,
    **_: Any,
) -> list[float]:
    """Countdown's reward, and 1.0 for every completion of a prompt of level "any"."""
    solved = countdown_reward(completions, numbers, target)
    levels = level or ["open"] * len(solved)
    return [1.0 if one == "any" else score for one, score in zip(levels, solved, strict=True)]


def _countdown_model(_: Path) -> str:
    return str(base_model_path())


def _gym_model(_: Path) -> str:
    return str(gym.BASE)


@cache
def _smollm2() -> dict[str, Any]:
    return runpy.run_path(str(_SMOLLM2))


def _smollm2_model(folder: Path) -> str:
    path = folder / "smollm2"
    if not (path / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _smollm2()["write_model"](path)
    return str(path)


@cache
def smollm2_rows(split: str) -> list[dict[str, Any]]:
    """Sums as conversations, for a chat model: 400 for training, 100 for tuning, 128 held out."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        _smollm2()["write_problems"](Path(folder))
        name = "test" if split == "heldout" else "train"
        lines = (Path(folder) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for problem in map(json.loads, lines):
        text = f"{problem['question']} Answer with the number only."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": problem["answer"]})
    return {"heldout": rows, "tuning": rows[-100:], "train": rows[:-100]}[split]


def smollm2_reward(completions: Sequence[Any], answer: Sequence[int], **_: Any) -> list[float]:
    """1 if the last number of a completion is the answer."""
    found: list[float] = _smollm2()["last_number"](completions, answer)
    return found


# A small step: learning is limited by the number of prompts that pay.
_MIXED: dict[str, Any] = {"budget": 2048, "completions_per_step": 16, "signal": "open"}

TASKS = {
    task.name: task
    for task in (
        Task(
            name="mixture",
            title="Countdown, a third without a solution and a third that any answer solves",
            rows=mixture_rows,
            reward=mixture_reward,
            model=_countdown_model,
            has_levels=True,
            confirmed=("variance_column", "regression_drawn", "regression_drawn_decay"),
            **_MIXED,
        ),
        Task(
            name="hidden",
            title="The same, but the text does not tell which",
            rows=hidden_rows,
            reward=mixture_reward,
            model=_countdown_model,
            **_MIXED,
        ),
        Task(
            name="countdown",
            title="Countdown with visible search (reward 0 or 1)",
            rows=countdown_rows,
            reward=countdown_reward,
            model=_countdown_model,
        ),
        Task(
            name="gym",
            title="reasoning-gym at three levels",
            rows=gym.make_rows,
            reward=gym.gym_reward,
            model=_gym_model,
            max_tokens=10,
            budget=16384,
            completions_per_step=64,
            samples=8,
            has_levels=True,
            confirmed=("variance_column", "regression", "regression_drawn", "regression_text"),
        ),
        Task(
            name="smollm2",
            title="SmolLM2-135M-Instruct on sums",
            rows=smollm2_rows,
            reward=smollm2_reward,
            model=_smollm2_model,
            rates=(5e-6, 1e-5, 2e-5),
            max_tokens=16,
            budget=768,
            completions_per_step=16,
            samples=1,
            seeds=5,
        ),
    )
}
