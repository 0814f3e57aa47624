"""The compared arms, their common options, and the jobs that follow from both.

Plain Python, independent of the code that executes a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPLETIONS_PER_STEP = 64
# All arms have one KL weight, in place of the one of their presets: they differ only in the
# estimator.
BETA = 0.001
TUNING_SEED = 100
SEEDS = (0, 1, 2)
# The arm with which the others are compared.
REFERENCE_ARM = "rloo_k8"


@dataclass(frozen=True)
class Arm:
    """`size` is K, the number of completions per prompt. `options` are the options of the
    objective."""

    title: str
    size: int
    options: Mapping[str, Any]


def _rloo(size: int) -> Arm:
    return Arm(f"RLOO, K = {size}", size, {"preset": "paper"})


ARMS = {
    "rloo_k2": _rloo(2),
    "rloo_k4": _rloo(4),
    "rloo_k8": _rloo(8),
    "rloo_k16": _rloo(16),
    # Among the KL estimators in the loss, only k2 has the gradient of a KL penalty in the reward.
    "rloo_kl_loss": Arm(
        "RLOO, KL in the loss (k2)",
        8,
        {"preset": "paper", "kl_placement": "loss", "kl_estimator": "k2"},
    ),
    "grpo": Arm("GRPO", 8, {"preset": "grpo"}),
    "dr_grpo": Arm("Dr. GRPO", 8, {"preset": "dr_grpo"}),
    "reinforce_pp": Arm("REINFORCE++", 1, {"preset": "reinforce_pp"}),
    "reinforce_pp_baseline": Arm("REINFORCE++ baseline", 8, {"preset": "reinforce_pp_baseline"}),
    "reinforce_running": Arm(
        "REINFORCE, running mean", 1, {"preset": "paper", "mean_level": "running"}
    ),
}


@dataclass(frozen=True)
class Task:
    """`rows` returns the rows of a split, "train" or "heldout". `reward` is the reward function.
    `model` returns the folder of the base model. If the model is missing, `model` creates it in the
    folder that is its argument."""

    name: str
    title: str
    steps: int
    rates: tuple[float, ...]
    max_tokens: int
    rows: Callable[[str], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    model: Callable[[Path], str]


@dataclass(frozen=True)
class Job:
    """The work of one process: a training run of an arm, or with `arm` None the gradient variance.

    `heldout`: whether the model is evaluated before and after. `options` has all trainer options
    that influence the result, so that a result with other options is not used for this job.
    """

    task: str
    arm: str | None
    heldout: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path of the result, relative to the folder of all results."""
        if self.arm is None:
            return Path(self.task) / "variance.json"
        rate, seed = self.options["learning_rate"], self.options["seed"]
        return Path(self.task) / self.arm / f"rate{rate:g}_seed{seed}.json"


def training_job(task: Task, arm: str, *, rate: float, seed: int, steps: int | None = None) -> Job:
    """A training run of `steps`, by default the task's number. Runs with the tuning seed are not
    evaluated: the criterion for the learning rate must not be a reported figure."""
    chosen = ARMS[arm]
    options = {
        **chosen.options,
        "beta": BETA,
        "num_generations": chosen.size,
        "num_prompts": COMPLETIONS_PER_STEP // chosen.size,
        "max_completion_length": task.max_tokens,
        "max_steps": steps or task.steps,
        "learning_rate": rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        # The scale of the loss differs between arms. Adam is invariant to the scale, clipping is
        # not.
        "max_grad_norm": 0.0,
        "num_generations_eval": 2,
        "seed": seed,
        **PLAIN,
    }
    return Job(task.name, arm, seed != TUNING_SEED, options)


# Options for a small model on a CPU. Only metrics are written.
PLAIN = {
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "num_threads": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def tuning_jobs(task: Task, arms: Sequence[str], steps: int | None = None) -> list[Job]:
    """The tuning runs: the same grid of learning rates for each arm."""
    return [
        training_job(task, arm, rate=rate, seed=TUNING_SEED, steps=steps)
        for arm in arms
        for rate in task.rates
    ]


def variance_job(task: Task, **settings: Any) -> Job:
    """The job for the gradient variance at a task's base model. `settings` replace default settings
    of `benchmarks.baselines.variance.measure`."""
    options = {
        "num_prompts": 8,
        "num_completions": 1024,
        "num_coordinates": 4096,
        "sizes": [2, 4, 8, 16],
        "max_tokens": task.max_tokens,
    }
    return Job(task.name, None, False, options | settings)
