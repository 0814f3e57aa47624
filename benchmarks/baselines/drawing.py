"""The second moment of a gradient if prompts are drawn with weights, relative to uniform drawing.

A prompt x of N is drawn with probability q(x), and the gradient g of a group of its completions has
the weight 1 / (N q(x)). The mean does not depend on q. The second moment is the sum of G(x) / q(x)
over all x, divided by N^2, with G(x) = E |g|^2 at prompt x. The least is at q(x) in proportion to
the root of G(x).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.baselines.arms import SIZE, Task
from benchmarks.baselines.middle import write_twice
from benchmarks.baselines.results import Results
from benchmarks.baselines.training import make_trainer
from benchmarks.baselines.variance import OPTIONS, Gradients, draw
from rloo.config.kwargs_options import PromptSamplingKwargs
from rloo.data.variance_sampler import shares_of
from rloo.types import Sample

FLOOR = PromptSamplingKwargs().floor
SETTINGS: dict[str, Any] = {"num_prompts": 120, "num_groups": 32}
_DIGITS = 5


def write_drawing(tasks: Sequence[Task], results: Results, rate: float | None = None) -> None:
    """Measure the tasks at the start and in the middle of a run, and write the figures `drawing`.
    `rate` is the learning rate of the run, by default the tuned one. Raises ValueError if there is
    neither."""
    write_twice("drawing", partial(measure, options=SETTINGS), tasks, results, rate)


def measure(task: Task, options: dict[str, Any], *, model: str) -> dict[str, Any]:
    """The second moments at `num_prompts` training prompts with `num_groups` groups each."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = {"max_completion_length": task.max_tokens, "num_generations": SIZE}
        trainer = make_trainer(task, OPTIONS | sampled, model=model, folder=Path(folder) / "run")
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        gradients = Gradients(trainer)
        moments = Moments(options["num_groups"])
        for prompt in rollouts.prompts.next(options["num_prompts"]):
            samples = draw(trainer, rollouts, prompt, options["num_groups"] * SIZE)
            moments.add(samples, gradients, prompt.columns.get("level"))
    return moments.summary()


class Moments:
    """Rewards and gradients of groups of `SIZE` completions, by prompt."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._squares: list[np.ndarray] = []  # |g|^2 of each group
        self._rewards: list[np.ndarray] = []
        self._levels: list[str | None] = []
        self._mean: Any = 0.0  # the sum over prompts of the mean gradients
        self._variance_of_mean = 0.0

    def add(self, samples: Sequence[Sample], gradients: Gradients, level: str | None) -> None:
        """Add the groups of one more prompt. A group with equal rewards has the gradient 0."""
        rewards = np.array([sample.reward for sample in samples]).reshape(-1, SIZE)
        pays = rewards.min(1) != rewards.max(1)
        chosen = [s for n, s in enumerate(samples) if pays[n // SIZE]]
        squares, total = np.zeros(self._num_groups), 0.0
        if chosen:
            found = gradients.of_groups(chosen, SIZE, {})
            squares[pays] = (found**2).sum(1).numpy()
            mean = found.sum(0) / self._num_groups
            self._mean, total = self._mean + mean, float((mean**2).sum())
        self._variance_of_mean += (squares.mean() - total) / (self._num_groups - 1)
        self._squares.append(squares)
        self._rewards.append(rewards)
        self._levels.append(level)

    def summary(self) -> dict[str, Any]:
        """`second_moment`: of a group at uniformly drawn prompts. `signal`: the share of it that is
        the squared norm of the mean. `relative`: the second moments of `Drawn`, relative to it.
        `pass_rates` and `signals`: the share of completions with the full reward and of groups
        whose rewards differ, by level."""
        drawn = Drawn(np.stack(self._squares), np.stack(self._rewards), self._levels)
        count, uniform = len(self._squares), float(drawn.squares.mean())
        # The squared norm of a mean is biased upwards by the variance of the mean.
        signal = (float((self._mean**2).sum()) - self._variance_of_mean) / count**2
        passed = (drawn.rewards >= 1.0).mean((1, 2))
        differ = (drawn.rewards.min(2) != drawn.rewards.max(2)).mean(1)
        return {
            "prompts": count,
            "groups": self._num_groups,
            "second_moment": _rounded(uniform),
            "signal": _rounded(signal / uniform),
            "relative": {
                name: [_rounded(value) for value in drawn.relative(name)]
                for name in ("gradient", "deviation", "column")
                if name != "column" or drawn.has_levels
            },
            "pass_rates": drawn.by_level(passed),
            "signals": drawn.by_level(differ),
        }


@dataclass(frozen=True)
class Drawn:
    """`squares` (N, groups) of gradients, `rewards` (N, groups, K), and the level of each prompt.

    q is in proportion to an estimate: `gradient` (the root of the second moment of the prompt's
    gradient: the best q), `deviation` (that of the prompt's reward), or `column` (the deviation
    within prompts, pooled by level: what `prompt_sampling_kwargs.column` learns)."""

    squares: np.ndarray
    rewards: np.ndarray
    levels: Sequence[str | None]

    @property
    def has_levels(self) -> bool:
        return any(level is not None for level in self.levels)

    def relative(self, name: str) -> tuple[float, float]:
        """The second moment relative to uniform drawing. First, the groups that estimate q also
        tell the moment: such an estimate seems better than it can be. Second, one half of the
        groups estimates q and the other half tells the moment, in turn: such an estimate has more
        noise than that of all groups."""
        every, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
        same = self._moment(self.estimate(name, every), every)
        crossed = [self._moment(self.estimate(name, a), b) for a, b in ((even, odd), (odd, even))]
        uniform = float(self.squares.mean())
        return same / uniform, fmean(crossed) / uniform

    def estimate(self, name: str, groups: slice) -> np.ndarray:
        """The estimate of each prompt from some of the groups, (N,)."""
        if name == "gradient":
            return np.sqrt(self.squares[:, groups].mean(1))
        rewards = self.rewards[:, groups].reshape(len(self.rewards), -1)
        variance = rewards.var(1, ddof=1)
        if name == "column":
            kinds = np.array([str(level) for level in self.levels])
            variance = np.array([variance[kinds == kind].mean() for kind in kinds])
        return np.sqrt(variance)

    def _moment(self, estimate: np.ndarray, groups: slice) -> float:
        return float((self.squares[:, groups].mean(1) / shares_of(estimate, FLOOR)).mean())

    def by_level(self, values: np.ndarray) -> dict[str, float]:
        """The mean by level; a task without levels has one, ""."""
        kinds = np.array([level or "" for level in self.levels])
        return {kind: _rounded(float(values[kinds == kind].mean())) for kind in sorted({*kinds})}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
