"""The variance of a group's gradient as a function of K: measured, and predicted.

RLOO's gradient of a group is a U-statistic of order 2 (Hoeffding 1948): with the score s = grad log
pi(y), it is the mean over all pairs of h(y1, y2) = (r1 - r2)(s1 - s2) / 2. So its variance is

    (4 (K - 2) z1 + 2 z2) / (K (K - 1)),   z1 = Var(E[h | y1]) = Var((r - mu) s) / 4,  z2 = Var(h)

since E[h | y1] = ((r1 - mu) s1 + g) / 2 with mu = E r, g = E[r s] and E s = 0. Variances of vectors
are traces of covariances. For an equal number of completions, K times the variance decreases from 2
z2 at K = 2 to 4 z1 for large K. The limit 4 z1 is the variance of REINFORCE with the true mean as
baseline.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines.arms import Task
from benchmarks.baselines.cells import PLAIN
from benchmarks.baselines.middle import middle_model, rate_of
from benchmarks.baselines.results import Results
from benchmarks.baselines.training import make_trainer
from rloo import RLOOConfig, RLOOTrainer
from rloo.algorithm.advantages import compute_advantages
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.rank_rollout import RewardScorer
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.algorithm.update import micro_batch_loss
from rloo.config.batch_sizes import batches_of
from rloo.engines.counter_rng import noise_key
from rloo.model.policy import Policy
from rloo.types import Prompt, Rollout, Sample

NUM_RESAMPLES = 1000
# Completions sampled in one call of the engine.
_AT_ONCE = 256
# The gradient depends only on the rewards: at the base model the KL is 0.
OPTIONS: dict[str, Any] = {
    "preset": "paper",
    "beta": 0.0,
    "num_prompts": 1,
    "num_threads": 1,
    **PLAIN,
}
SETTINGS: dict[str, Any] = {
    "num_prompts": 8,
    "num_completions": 1024,
    "num_coordinates": 4096,
    "sizes": [2, 4, 8, 16],
}
NO_BASELINE = {"mean_level": "none"}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": {},
    "std": {"mean_leave1out": False, "std_level": "group"},
    "none": NO_BASELINE,
}


def predicted_variance(size: int, z1: float | Tensor, z2: float | Tensor) -> Any:
    """The variance of RLOO's gradient of a group of `size`, from z1 and z2 (see the module)."""
    return (4 * (size - 2) * z1 + 2 * z2) / (size * (size - 1))


def trace_variance(vectors: Tensor, counts: Tensor) -> Tensor:
    """The unbiased trace of the covariance of vectors (n, D), for each row of `counts` (B, n). A
    row has the number of times that each vector is in a resample. The first row is the sample
    itself."""
    n = len(vectors)
    sums = counts @ vectors
    squares = counts @ (vectors**2).sum(1)
    found = (squares - (sums**2).sum(1) / n) / (n - 1)
    # The variance of a bootstrap resample of n is smaller by the factor (n - 1) / n.
    found[1:] *= n / (n - 1)
    return found


def resamples(n: int, generator: torch.Generator) -> Tensor:
    """Counts (1 + NUM_RESAMPLES, n): one row for the sample itself, followed by its bootstrap
    resamples."""
    drawn = torch.randint(n, (NUM_RESAMPLES, n), generator=generator)
    counts = torch.zeros(NUM_RESAMPLES, n, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return torch.cat([torch.ones(1, n, dtype=torch.float64), counts])


def write_variances(tasks: Sequence[Task], results: Results) -> None:
    """Measure the tasks at their base models, and write the figures `variance`."""
    for task in tasks:
        found = measure(task, SETTINGS, model=task.model(results.out))
        results.write_figures("variance", {task.name: found})


def write_middle_variances(
    tasks: Sequence[Task], results: Results, rate: float | None = None
) -> None:
    """As `write_variances`, in the middle of a run with the learning rate `rate`, by default the
    tuned one. Raises ValueError if there is neither."""
    rates = [rate_of(task, results, rate) for task in tasks]
    for task, used in zip(tasks, rates, strict=True):
        with middle_model(task, used, out=results.out) as model:
            found = measure(task, SETTINGS, model=model)
        results.write_figures("variance_middle", {task.name: {"rate": used, **found}})


def measure(task: Task, options: dict[str, Any], *, model: str) -> dict[str, Any]:
    """K times the variances, summed over prompts: measured, and predicted from other completions.
    Each is [value, low, high] with a 95 % bootstrap interval over the completions of these prompts.

    `noise` is this variance divided by the squared norm of the sum of the prompts' gradients. It
    allows a comparison of estimators with different scales.
    """
    with tempfile.TemporaryDirectory() as folder:
        sampled = {"max_completion_length": task.max_tokens, "num_generations": 2}
        trainer = make_trainer(task, OPTIONS | sampled, model=model, folder=Path(folder) / "run")
        parts, _ = trainer.make_parts()
        rollouts: Any = parts.rollouts
        prompts = rollouts.prompts.next(options["num_prompts"])
        gradients = Gradients(trainer, options["num_coordinates"])
        tallies: dict[tuple[str, int], Tally] = {}
        theory = Theory()
        for number, prompt in enumerate(prompts):
            count = 2 * options["num_completions"]
            samples = draw(trainer, rollouts, prompt, count)
            first, second = samples[: count // 2], samples[count // 2 :]
            for estimator in ESTIMATORS:
                for size in options["sizes"]:
                    if estimator != "none" or size == options["sizes"][-1]:
                        vectors = gradients.of_groups(first, size, ESTIMATORS[estimator])
                        tallies.setdefault((estimator, size), Tally(size)).add(vectors, number)
            theory.add(gradients.scores(second), [s.reward for s in second], number)
    return {
        "measured": [
            {"estimator": estimator, "size": size, **tally.summary()}
            for (estimator, size), tally in tallies.items()
        ],
        "predicted": {str(size): theory.summary(size) for size in options["sizes"]},
        "limit": interval(4 * theory.z1),
        "no_baseline": interval(theory.plain),
        "mean_rewards": theory.mean_rewards,
    }


def draw(
    trainer: RLOOTrainer, rollouts: SyncRolloutGenerator, prompt: Prompt, count: int
) -> list[Sample]:
    """Scored completions of the base model, each in a group of one."""
    policy, engine = trainer.policy, trainer.engine
    engine.load(policy.weights, policy.version)
    found: list[Sample] = []
    for start in range(0, count, _AT_ONCE):
        size = min(_AT_ONCE, count - start)
        noise = noise_key(trainer.args.seed, "eval", start)
        sampled = engine.sample([prompt], size, rollouts.sampling, noise)
        judge = RewardScorer(rollouts.rewards, policy.tokenizer, policy.world)
        groups, _ = judge.score([prompt], sampled)
        found += make_training_samples(
            Rollout(groups, {}, 0, policy.version, {}, 0.0), trainer.args
        )
    return found


class Gradients:
    """Gradients computed by the training code, for a fixed random subset of parameters; None: for
    all."""

    def __init__(self, trainer: RLOOTrainer, num_coordinates: int | None = None) -> None:
        self._policy: Policy = trainer.policy
        self._config: RLOOConfig = trainer.args
        total = sum(p.numel() for p in self._policy.parameters)
        generator = torch.Generator().manual_seed(0)
        self._chosen: Tensor | slice = slice(None)
        if num_coordinates is not None:
            self._chosen = torch.randperm(total, generator=generator)[:num_coordinates]

    def of_groups(self, samples: Sequence[Sample], size: int, estimator: dict[str, Any]) -> Tensor:
        """The gradients of groups: (groups, coordinates), float64. Consecutive samples form groups
        of `size`."""
        config = replace(self._config, num_generations=size, **estimator)
        groups = [samples[i : i + size] for i in range(0, len(samples) - size + 1, size)]
        return torch.stack([self._gradient([group], config) for group in groups])

    def of_rollouts(
        self, prompts: Sequence[Sequence[Sample]], size: int, estimator: dict[str, Any]
    ) -> Tensor:
        """The gradients of rollouts of all prompts: (rollouts, coordinates), float64. Consecutive
        samples of a prompt form groups of `size`, one in each rollout."""
        config = replace(self._config, num_generations=size, num_prompts=len(prompts), **estimator)
        found = []
        for start in range(0, len(prompts[0]) - size + 1, size):
            groups = [samples[start : start + size] for samples in prompts]
            found.append(self._gradient(groups, config))
        return torch.stack(found)

    def scores(self, samples: Sequence[Sample]) -> Tensor:
        """The gradient of each sample's log-prob: (samples, coordinates)."""
        rewarded = [replace(sample, reward=1.0) for sample in samples]
        return self.of_groups(rewarded, 1, NO_BASELINE)

    def _gradient(self, groups: Sequence[Sequence[Sample]], config: RLOOConfig) -> Tensor:
        policy = self._policy
        samples = [
            replace(sample, key=(number, index))
            for number, group in enumerate(groups)
            for index, sample in enumerate(group)
        ]
        terms = LossContext(config, batches_of(config, world_size=1), config.beta)
        credit = compute_advantages(samples, policy, terms)
        loss, _ = micro_batch_loss(policy, policy.batch(samples), credit, terms, len(samples))
        found = torch.autograd.grad(-loss, policy.parameters)
        return torch.cat([g.flatten() for g in found])[self._chosen].double()


@dataclass
class Tally:
    """Sums over prompts for groups of one size and estimator: K times the variance, and the squared
    norm of the summed gradients. Shape (B,): the sample itself, followed by resamples."""

    size: int
    variance: Tensor | float = 0.0
    mean: Tensor | float = 0.0
    variance_of_mean: Tensor | float = 0.0

    def add(self, vectors: Tensor, number: int) -> None:
        """Add the groups of one more prompt."""
        counts = resamples(len(vectors), torch.Generator().manual_seed(number))
        variance = trace_variance(vectors, counts)
        self.variance = self.variance + self.size * variance
        self.mean = self.mean + counts @ vectors / len(vectors)
        self.variance_of_mean = self.variance_of_mean + variance / len(vectors)

    def summary(self) -> dict[str, Any]:
        assert isinstance(self.mean, Tensor) and isinstance(self.variance, Tensor)
        squared = (self.mean**2).sum(1)
        # The squared norm of a mean is biased upwards by the variance of the mean. For a resample
        # the bias is twice as large.
        share = torch.full_like(squared, 2.0)
        share[0] = 1.0
        signal = squared - share * self.variance_of_mean
        return {"variance": interval(self.variance), "noise": interval(self.variance / signal)}


class Theory:
    """z1, z2 and the variance without a baseline, summed over prompts. Shape (B,) as in `Tally`."""

    def __init__(self) -> None:
        self.z1: Any = 0.0
        self.z2: Any = 0.0
        self.plain: Any = 0.0
        self.mean_rewards: list[float] = []

    def add(self, scores: Tensor, rewards: Sequence[float], number: int) -> None:
        """Add the completions of one more prompt: scores (n, D), n even. Two neighbours form a
        pair. A resample has both or neither of them."""
        r = torch.tensor(rewards, dtype=torch.float64)[:, None]
        self.mean_rewards.append(round(r.mean().item(), 4))
        pairs = (r[::2] - r[1::2]) * (scores[::2] - scores[1::2]) / 2
        counts = resamples(len(pairs), torch.Generator().manual_seed(number))
        of_each = counts.repeat_interleave(2, 1)
        self.z1 = self.z1 + trace_variance((r - r.mean()) * scores, of_each) / 4
        self.z2 = self.z2 + trace_variance(pairs, counts)
        self.plain = self.plain + trace_variance(r * scores, of_each)

    def summary(self, size: int) -> list[float]:
        """K times the predicted variance, with its interval."""
        return interval(size * predicted_variance(size, self.z1, self.z2))


def interval(values: Tensor) -> list[float]:
    """[the sample's own value, 2.5 % and 97.5 % points of the resamples], 5 digits."""
    low, high = torch.quantile(values[1:], torch.tensor([0.025, 0.975], dtype=values.dtype))
    return [float(f"{value:.5g}") for value in (values[0].item(), low.item(), high.item())]
