"""A model in the middle of a run: trained by the arm `rloo` for half of a task's budget."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.baselines.arms import Task
from benchmarks.baselines.cells import make_cell
from benchmarks.baselines.results import Results, choose_rate, tuning_scores
from benchmarks.baselines.training import make_trainer


def rate_of(task: Task, results: Results, given: float | None) -> float:
    """The learning rate: `given`, or that of the arm `rloo`. Raises ValueError if there is none."""
    if given is not None:
        return given
    try:
        rate = choose_rate(tuning_scores(results, task, "rloo"))
    except ValueError as error:
        raise ValueError(f"{task.name} has no tuned learning rate: {error} (--rate)") from error
    assert rate is not None  # the arm has a grid
    return rate


@contextmanager
def middle_model(task: Task, rate: float, *, out: Path) -> Iterator[str]:
    """The folder of the model that seed 0 has after half of the budget, until the block ends. The
    rate is constant, so a run of the whole budget has the same weights there."""
    cell = make_cell(task, "rloo", rate=rate, seed=0, budget=task.budget // 2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            task, cell.options, model=task.model(out), folder=Path(folder) / "run"
        )
        trainer.train()
        trainer.save_model(f"{folder}/model")
        yield f"{folder}/model"


def write_twice(
    name: str,
    measure: Callable[..., dict[str, Any]],
    tasks: Sequence[Task],
    results: Results,
    rate: float | None,
) -> None:
    """Measure tasks at the start and in the middle of a run with the learning rate `rate`, by
    default the tuned one, and write the figures `name`. `measure` takes a task, and `model`.
    Raises ValueError before the first measurement if there is no rate."""
    rates = [rate_of(task, results, rate) for task in tasks]
    for task, used in zip(tasks, rates, strict=True):
        start = measure(task, model=task.model(results.out))
        with middle_model(task, used, out=results.out) as model:
            middle = measure(task, model=model)
        results.write_figures(name, {task.name: {"rate": used, "start": start, "middle": middle}})
