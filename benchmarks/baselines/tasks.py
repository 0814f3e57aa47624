"""The tasks on which the arms are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from benchmarks.baselines import sorting
from benchmarks.baselines.arms import Task
from rloo.data.tasks.countdown import Split, base_model_path, countdown_reward, make_problems


def _countdown_rows(split: str) -> list[dict[str, Any]]:
    return make_problems(cast(Split, split))


def _countdown_model(_: Path) -> str:
    return str(base_model_path())


TASKS = {
    task.name: task
    for task in (
        Task(
            name="countdown",
            title="Countdown with visible search (reward 0 or 1)",
            steps=50,
            rates=(1e-4, 2e-4, 4e-4, 8e-4),
            max_tokens=60,
            rows=_countdown_rows,
            reward=countdown_reward,
            model=_countdown_model,
        ),
        Task(
            name="sorting",
            title="Sorting six letters (reward: share of right positions)",
            steps=150,
            rates=(2.5e-4, 5e-4, 1e-3),
            max_tokens=10,
            rows=sorting.make_rows,
            reward=sorting.sorting_reward,
            model=sorting.ensure_base,
        ),
    )
}
