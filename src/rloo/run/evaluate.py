"""Held-out accuracy through the same engine and rewards as training, with confidence intervals.

Draws its own noise, the same at every evaluation: training is not disturbed, and two evaluations of
one run differ by the policy, not by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo.algorithm.rollout import score
from rloo.report.metrics import deviation, rollout_metrics
from rloo.rewards import RewardSet
from rloo.types import Engine, Group, Prompt, Sampling

# 97.5 % point of the normal distribution.
Z = 1.959963984540054


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: RewardSet,
    *,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    num_samples: int,
    noise: int,
    pass_threshold: float,
    pass_k: Sequence[int] = (1,),
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    trainer_state: Any = None,
) -> tuple[dict[str, Any], list[Group]]:
    """Sampled and greedy accuracy, pass@k, mean reward and lengths; and the sampled groups.

    A completion passes when the first reward function gives it at least `pass_threshold`; one that
    could not be scored does not pass. `precision` is the context that the engine samples in.
    `*_interval` are 95 % intervals over the prompts. Raises
    ValueError if a k is larger than `num_samples`.
    """
    if max(pass_k) > num_samples:
        raise ValueError(
            f"pass@{max(pass_k)} needs {max(pass_k)} samples per prompt; there are {num_samples} "
            "(num_generations_eval, eval_pass_k)"
        )

    def measure(how: Sampling, count: int) -> tuple[list[Group], dict[str, float]]:
        with precision():
            sampled = engine.sample(prompts, count, how, noise)
        return score(
            prompts,
            sampled,
            rewards,
            tokenizer=tokenizer,
            trainer_state=trainer_state,
            learn=False,
        )

    groups, logged = measure(sampling, num_samples)
    greedy, _ = measure(replace(sampling, greedy=True), 1)
    report: dict[str, Any] = {"num_prompts": len(prompts), "num_samples": num_samples}
    for k in pass_k:
        chances = [pass_at_k(_passed(g, pass_threshold), num_samples, k) for g in groups]
        report[f"pass@{k}"] = fmean(chances)
        report[f"pass@{k}_interval"] = interval(chances)
    hits = [float(_passed(g, pass_threshold)) for g in greedy]
    report["pass@1_greedy"] = fmean(hits)
    report["pass@1_greedy_interval"] = interval(hits)
    return report | rollout_metrics(groups) | logged, groups


def pass_at_k(num_passed: int, num_samples: int, k: int) -> float:
    """The chance that k of the samples, drawn without return, hold one that passed (Chen et al.
    2021, arXiv 2107.03374, equation 1): unbiased."""
    failed = num_samples - num_passed
    return 1.0 - math.comb(failed, k) / math.comb(num_samples, k)


def interval(values: Sequence[float]) -> list[float]:
    """95 % confidence interval of the mean of per-prompt values in [0, 1].

    Wilson's, with the number of prompts replaced by the number of Bernoulli draws that would have
    the same variance, so that it also fits means over several samples and stays within [0, 1].
    """
    n, mean = len(values), fmean(values)
    variance = deviation(values) ** 2 if n > 1 else 0.0
    if variance > 0:
        n = max(n, round(mean * (1 - mean) / (variance / n)))
    centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    # Rounding must not put the mean outside its own interval.
    return [max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))]


def _passed(group: Group, threshold: float) -> int:
    first = next(iter(group.scores.values()))
    return sum(score is not None and score >= threshold for score in first)
