"""A cell is one training run of an arm: its options, and the cells that a comparison needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.baselines.arms import ARMS, BETA, TUNING_SEEDS, Arm, Task

# The parts of the budget after which the weights are saved for the evaluation: most at the start,
# where the arms differ.
FRACTIONS = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
# Options for a small model on a CPU. Only metrics are written.
PLAIN = {
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}
# A constant rate: a point of a curve is then the end of a run with this budget. The scale of the
# loss differs between arms by factors; Adam does not depend on it, and clipping would.
_SCHEDULE = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3, "max_grad_norm": 0.0}


@dataclass(frozen=True)
class Cell:
    """`rate` is None for an arm with the learning rate of its trainer's defaults. `options` are all
    trainer options that influence the result: a result with other options is not this cell's."""

    task: str
    arm: str
    rate: float | None
    seed: int
    budget: int
    options: dict[str, Any]

    @property
    def is_tuning(self) -> bool:
        """Whether the run decides on the learning rate, and is never reported."""
        return self.seed in TUNING_SEEDS

    @property
    def name(self) -> str:
        rate = "default" if self.rate is None else f"{self.rate:g}"
        return f"{self.task}/{self.arm}/rate{rate}_seed{self.seed}"

    @property
    def path(self) -> Path:
        """The path of the result, relative to the folder of all results."""
        return Path(f"{self.name}.json")


def make_cell(
    task: Task, arm: str, *, rate: float | None, seed: int, budget: int | None = None
) -> Cell:
    """The cell of an arm at a learning rate. `budget` is in completions, by default the task's."""
    chosen, budget = ARMS[arm], budget or task.budget
    make = _ours if chosen.trainer == "rloo" else _trls
    options = {"max_completion_length": task.max_tokens, "seed": seed, **PLAIN}
    options |= make(task, chosen, budget)
    if rate is not None:
        options["learning_rate"] = rate
    return Cell(task.name, arm, rate, seed, budget, options)


def _ours(task: Task, arm: Arm, budget: int) -> dict[str, Any]:
    prompts = task.completions_per_step // arm.size
    return {
        "beta": BETA,
        "num_generations": arm.size,
        "num_prompts": prompts,
        "max_steps": budget // (prompts * arm.size),
        "num_threads": 1,
        **_SCHEDULE,
        **arm.options,
    }


def _trls(task: Task, arm: Arm, budget: int) -> dict[str, Any]:
    """TRL's names. Its defaults have 8 completions per step."""
    plain = {"dataloader_pin_memory": False, "report_to": "none"}
    if arm.defaults:
        return plain | {"max_steps": budget // 8}
    return plain | {
        "beta": BETA,
        "num_generations": arm.size,
        "per_device_train_batch_size": task.completions_per_step,
        "max_steps": budget // task.completions_per_step,
        **_SCHEDULE,
        **arm.options,
    }


def tuning_cells(task: Task, arm: str, budget: int | None = None) -> list[Cell]:
    """The tuning runs: the same grid and seeds for each arm. None for an arm with the
    defaults."""
    if ARMS[arm].defaults:
        return []
    return [
        make_cell(task, arm, rate=rate, seed=seed, budget=budget)
        for seed in TUNING_SEEDS
        for rate in task.rates
    ]


def final_cells(
    task: Task, arm: str, rate: float | None, seeds: Sequence[int], budget: int | None = None
) -> list[Cell]:
    """The reported runs at the chosen learning rate."""
    return [make_cell(task, arm, rate=rate, seed=seed, budget=budget) for seed in seeds]
