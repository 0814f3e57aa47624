"""How much of the gradient's second moment is left if estimates of rewards draw the prompts.

    PYTHONPATH=src python -m benchmarks.prompt_probes [--rollouts 4 8 16 32] [--seeds 8]

The mean over prompts of v / (N q), relative to uniform drawing: v is the variance of a prompt's
reward, q the chance with which the estimate draws it among all prompts. Rewards are drawn with the
pass rates that the levels of a task have at the start; there is no training. Features are those of
the base model. `known` has the true deviations from the start: it is the bound.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.arms import SIZE
from benchmarks.baselines.cells import make_cell
from benchmarks.baselines.tasks import TASKS
from benchmarks.baselines.training import make_trainer
from rloo.config.kwargs_options import PromptSamplingKwargs
from rloo.data.probe_sampler import ProbedEstimate, ProbeSampler
from rloo.data.reward_estimate import RewardedPrompt
from rloo.data.variance_sampler import VarianceSampler, draw_systematically, shares_of

ARMS = ("variance", "variance_column", "policy", "text")
# The pass rates of levels at the start (docs/baselines.md), and the prompts of a rollout.
RATES = {
    "mixture": ({"open": 0.2, "any": 1.0, "none": 0.0}, 4),
    "gym": ({"easy": 0.96, "middle": 0.33, "hard": 0.0}, 16),
}
FLOOR = PromptSamplingKwargs().floor


def left_after(
    sampler: VarianceSampler, rate_N: np.ndarray, num: int, rollouts: list[int], *, seed: int
) -> list[float]:
    """The second moment that is left after these numbers of rollouts of `num` prompts."""
    random, numbers = np.random.default_rng(seed), np.arange(len(rate_N))
    variance_N, estimate = rate_N * (1.0 - rate_N), sampler.estimate.copy()
    features_ND = sampler.look(numbers) if isinstance(sampler, ProbeSampler) else None
    left: list[float] = []
    for rollout in range(max(rollouts) + 1):
        found = None
        if isinstance(estimate, ProbedEstimate):
            found = estimate.deviations_among(numbers, features_ND)
        deviation_N = estimate.deviations() if found is None else found.deviation_M
        share_N = shares_of(deviation_N, FLOOR)
        if rollout in rollouts:
            left.append(float((variance_N / share_N).mean() / variance_N.mean()))
        drawn = []
        for number, weight in draw_systematically(share_N, num, random.random()):
            rewards = random.binomial(1, rate_N[number], SIZE).astype(float).tolist()
            looked: list[Any] = []
            if found is not None and features_ND is not None:
                looked = [*features_ND[number].tolist(), found.probe_M[number]]
                looked.append(found.prior_M[number])
            drawn.append(RewardedPrompt(number, weight, rewards, looked))
        estimate.add(drawn)
    return left


def measure(name: str, arm: str, rollouts: list[int], seeds: int, *, folder: Path) -> list[float]:
    """Means over `seeds` of the figures of `left_after`."""
    task, (rates, num) = TASKS[name], RATES[name]
    options = make_cell(task, arm, rate=1e-4, seed=0).options
    trainer = make_trainer(task, options, model=task.model(folder), folder=folder / arm)
    prompts: Any = trainer.make_parts()[0].rollouts.prompts  # type: ignore[attr-defined]
    rate_N = np.array([rates[level] for level in prompts.values("level").values()])
    found = [left_after(prompts.sampler, rate_N, num, rollouts, seed=seed) for seed in range(seeds)]
    trainer.end()
    return [float(value) for value in np.mean(found, 0)]


def known(name: str) -> float:
    """The bound: the deviations are known, and the levels are equally frequent."""
    rate_N = np.array([*RATES[name][0].values()])
    variance_N = rate_N * (1.0 - rate_N)
    share_N = shares_of(np.sqrt(variance_N), FLOOR)
    return float((variance_N / share_N).mean() / variance_N.mean())


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompt_probes")
    parser.add_argument("--rollouts", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    lines = [f"| task | estimate | {' | '.join(f'{n} rollouts' for n in options.rollouts)} |"]
    lines.append("|---" * (2 + len(options.rollouts)) + "|")
    for name in RATES:
        with tempfile.TemporaryDirectory() as folder:
            for arm in ARMS:
                row = measure(name, arm, options.rollouts, options.seeds, folder=Path(folder))
                lines.append(f"| {name} | {arm} | {' | '.join(f'{v:.2f}' for v in row)} |")
        bound = " | ".join([f"{known(name):.2f}"] * len(options.rollouts))
        lines.append(f"| {name} | known | {bound} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
