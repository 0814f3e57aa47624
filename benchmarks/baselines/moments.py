"""The second moment of a group's gradient by baseline, relative to leave-one-out.

The gradient of a group is the mean of A_i s_i over its completions, with the score s = grad log
pi(y). Baselines without bias have the same mean gradient, so the second moments tell their
variances. The regression is fitted by the production code on one half of the prompts and measured
on the other half, in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.baselines.arms import SIZE, Task
from benchmarks.baselines.middle import write_twice
from benchmarks.baselines.results import Results
from benchmarks.baselines.training import make_trainer
from benchmarks.baselines.variance import OPTIONS, Gradients, draw
from rloo import RLOOTrainer
from rloo.algorithm import token_values
from rloo.algorithm.regression import Observation, ReturnRegression
from rloo.types import Sample

SETTINGS: dict[str, Any] = {"num_prompts": 40, "num_groups": 32, "num_coordinates": 4096}
_AT_ONCE = 64
_DIGITS = 4


def write_moments(tasks: Sequence[Task], results: Results, rate: float | None = None) -> None:
    """Measure the tasks at the start and in the middle of a run, and write the figures `moments`.
    `rate` is the learning rate of the run, by default the tuned one. Raises ValueError if there is
    neither."""
    write_twice("moments", partial(measure, options=SETTINGS), tasks, results, rate)


def measure(task: Task, options: Mapping[str, Any], *, model: str) -> dict[str, Any]:
    """The second moments at `num_prompts` training prompts with `num_groups` groups each."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = {"max_completion_length": task.max_tokens, "num_generations": SIZE}
        trainer = make_trainer(task, OPTIONS | sampled, model=model, folder=Path(folder) / "run")
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        gradients = Gradients(trainer, options["num_coordinates"])
        found = []
        for prompt in rollouts.prompts.next(options["num_prompts"]):
            samples = draw(trainer, rollouts, prompt, options["num_groups"] * SIZE)
            scores = gradients.scores(samples).numpy()
            rewards = np.array([sample.reward for sample in samples])
            norms = score_norms(trainer, samples)
            found.append(ScoredPrompt(rewards, scores, norms, str(prompt.columns.get("level", ""))))
    return summary(found)


def score_norms(trainer: RLOOTrainer, samples: Sequence[Sample]) -> np.ndarray:
    """The sum of `EstimatorInput.score_norm_T` of each completion: what the regression reads."""
    policy, found = trainer.policy, []
    for start in range(0, len(samples), _AT_ONCE):
        batch = policy.batch(samples[start : start + _AT_ONCE])
        with torch.no_grad():
            scores = policy.logprobs(batch, reference=False, collision=True)
        found += [
            float(part.sum()) for part in token_values.score_norms(scores).split(batch.lengths)
        ]
    return np.array(found)


@dataclass(frozen=True)
class ScoredPrompt:
    """The completions of a prompt, in groups of `SIZE`: rewards (n,), scores (n, D), what the
    regression takes as squared norms (n,), and the level of the prompt."""

    rewards: np.ndarray
    scores: np.ndarray
    norms: np.ndarray
    level: str

    @property
    def others(self) -> np.ndarray:
        """The mean reward of the others of the group, (n,)."""
        groups = self.rewards.reshape(-1, SIZE)
        return ((groups.sum(1, keepdims=True) - groups) / (SIZE - 1)).ravel()

    def moment(self, baseline: np.ndarray | float) -> float:
        """The second moment of a group's gradient with these baselines, (n,)."""
        terms = (self.rewards - baseline)[:, None] * self.scores
        gradients = terms.reshape(-1, SIZE, terms.shape[1]).mean(1)
        return float((gradients**2).sum(1).mean())

    def observations(self) -> list[tuple[str, list[Observation]]]:
        """The values that the regression reads, by group."""
        above = self.rewards - self.others
        rows = np.stack([self.norms, above, self.others], axis=1).tolist()
        seen = [Observation(w, a, m) for w, a, m in rows]
        return [(self.level, seen[i : i + SIZE]) for i in range(0, len(seen), SIZE)]

    def line(self, fitted: ReturnRegression, pool: str) -> np.ndarray:
        """The baselines of a regression, (n,)."""
        constant, slope = fitted.coefficients(pool)
        return constant + (1 + slope) * self.others


def summary(prompts: Sequence[ScoredPrompt]) -> dict[str, Any]:
    """`relative`: the second moments over all prompts, relative to leave-one-out. `correlation`: of
    the logarithms of squared norms of scores and of what the regression takes for them. `prompts`:
    what the first prompts are like, by falling pass rate."""
    usual = sum(prompt.moment(prompt.others) for prompt in prompts)
    by_name: dict[str, float] = {"none": sum(prompt.moment(0.0) for prompt in prompts)}
    for fitted_on, measured_on in ((prompts[::2], prompts[1::2]), (prompts[1::2], prompts[::2])):
        fitted = ReturnRegression()
        fitted.add([group for one in fitted_on for group in one.observations()], half_life=1.0)
        for prompt in measured_on:
            for name, pool in (("regression", ""), ("column", prompt.level)):
                moment = prompt.moment(prompt.line(fitted, pool))
                by_name[name] = by_name.get(name, 0.0) + moment
    if len({prompt.level for prompt in prompts}) == 1:
        del by_name["column"]
    squares = np.concatenate([(prompt.scores**2).sum(1) for prompt in prompts])
    norms = np.concatenate([prompt.norms for prompt in prompts])
    known = (squares > 0) & (norms > 0)
    correlation = np.corrcoef(np.log(squares[known]), np.log(norms[known]))[0, 1]
    shown = sorted(prompts[:8], key=lambda prompt: -prompt.rewards.mean())
    return {
        "relative": {name: _rounded(moment / usual) for name, moment in by_name.items()},
        "correlation": _rounded(float(correlation)),
        "prompts": [_about(prompt) for prompt in shown],
    }


def _about(prompt: ScoredPrompt) -> dict[str, float | None]:
    """The pass rate, the mean squared norm of scores of successes and failures, the second moments
    of leave-one-out and without a baseline, and the best constant baseline."""
    squares, passed = (prompt.scores**2).sum(1), prompt.rewards >= 1.0
    return {
        "pass_rate": _rounded(float(passed.mean())),
        "successes": _rounded(fmean(squares[passed])) if passed.any() else None,
        "failures": _rounded(fmean(squares[~passed])) if not passed.all() else None,
        "leave_one_out": _rounded(prompt.moment(prompt.others)),
        "none": _rounded(prompt.moment(0.0)),
        "best": _rounded(float((squares * prompt.rewards).sum() / squares.sum())),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
