"""The statistics of a step as pure functions from plain numbers to a flat dict of named numbers.

A metric that TRL also logs has TRL's name; `metric_registry.py` explains each metric.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean

from rloo.tracking.metric_registry import of_steps
from rloo.types import Episode, Group

# 97.5 % point of the normal distribution: half the width of a 95 % interval, in standard errors.
Z = 1.959963984540054


# The names of a step's metrics, without the metrics of single reward functions.
OWN = {row.name for row in of_steps() if not row.name.startswith("rewards/")}


def require_free(names: Iterable[str], taken: Collection[str]) -> None:
    """Raise ValueError if a name in `names`, the metrics of a user's function, is in `taken` or is
    the name of a metric that the run writes."""
    for name in names:
        if name in OWN or name in taken:
            raise ValueError(
                f"a reward function logged the metric {name!r}, which the run writes itself; "
                "choose another name (log_metric)"
            )


def mean_of_parts(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of each metric over those parts of a rollout that have the metric. A part is
    (size, metrics), and the mean is weighted by size."""
    names = dict.fromkeys(name for _, metrics in parts for name in metrics)
    having = {name: [(n, m[name]) for n, m in parts if name in m] for name in names}
    return {
        name: sum(n * value for n, value in found) / sum(n for n, _ in found)
        for name, found in having.items()
    }


def rollout_metrics(groups: Sequence[Group], *, weighted: bool = False) -> dict[str, float]:
    """Return the metrics of a rollout that need no update: rewards (neither clipped nor reduced by
    the KL), lengths, and the share of groups whose rewards differ. With `weighted`, also those of
    prompts that were drawn with weights (`Prompt.weight`)."""
    rewards = [[r for r in group.rewards if r is not None] for group in groups]
    flat = [r for group in rewards for r in group]
    scored = [group for group in rewards if len(group) >= 2]
    lengths = [c.num_trained for g in groups for c in g.completions]
    ended = [c.num_trained for g in groups for c in g.completions if c.finish == "stop"]
    metrics = {
        "reward": _mean(flat),
        "reward_std": deviation(flat),
        "reward/standard_error": standard_error(rewards),
        "reward/unscored": float(len(lengths) - len(flat)),
        "groups/signal": _mean([float(max(g) != min(g)) for g in scored]),
        "frac_reward_zero_std": _mean([float(max(g) == min(g)) for g in scored]),
        "baseline/variance": deviation([b for g in scored for b in _baselines(g)]) ** 2,
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": 1.0 - len(ended) / len(lengths),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": float(min(ended, default=math.nan)),
        "completions/max_terminated_length": float(max(ended, default=math.nan)),
    }
    for name in groups[0].scores:
        values = [s for g in groups for s in g.scores[name] if s is not None]
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = deviation(values)
    if weighted:
        metrics |= _weighted_metrics(groups, rewards)
    return metrics | _episode_metrics(
        [c.episode for g in groups for c in g.completions if c.episode]
    )


def _weighted_metrics(
    groups: Sequence[Group], rewards: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The effective sample size of the prompts' weights, as a share of the prompts, and estimates
    of what uniformly drawn prompts would have: means over prompts with these weights."""
    weights = [group.prompt.weight for group in groups]
    squares = math.fsum(weight**2 for weight in weights)
    both = list(zip(weights, rewards, strict=True))
    scored = [(weight, fmean(some)) for weight, some in both if some]
    signal = [(weight, float(max(some) != min(some))) for weight, some in both if len(some) >= 2]
    sizes = [group.prompt.num_completions for group in groups]
    largest = {"prompt_sampling/largest_group": float(max(size or 0 for size in sizes))}
    return (largest if any(sizes) else {}) | {
        "prompt_sampling/effective_share": math.fsum(weights) ** 2 / (len(groups) * squares),
        "prompt_sampling/uniform_reward": _weighted_mean(scored),
        "prompt_sampling/uniform_signal": _weighted_mean(signal),
    }


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    total = math.fsum(weight for weight, _ in values)
    return math.fsum(weight * value for weight, value in values) / total if values else math.nan


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The metrics of multi-turn completions; empty without episodes."""
    if not episodes:
        return {}
    calls = sum(episode.calls for episode in episodes)
    return {
        "episodes/turns": _mean([episode.turns for episode in episodes]),
        "episodes/failed": float(sum(episode.failed is not None for episode in episodes)),
        "tools/call_frequency": calls / len(episodes),
        "tools/failure_frequency": sum(e.errors for e in episodes) / calls if calls else 0.0,
        "tools/time": math.fsum(episode.seconds for episode in episodes),
    }


def task_metrics(groups: Sequence[Group], threshold: float) -> dict[str, float]:
    """Return the metrics of each task in a dataset gym:NAME: the share of completions whose first
    reward passed, the task's share of the prompts, and the mean level of the prompts, if they have
    levels. Empty for other datasets."""
    by_task: dict[str, list[Group]] = {}
    for group in groups:
        if {"task", "level", "entry"} <= group.prompt.columns.keys():
            by_task.setdefault(group.prompt.columns["task"], []).append(group)
    metrics = {}
    for task, own in sorted(by_task.items()):
        scores = [s for g in own for s in next(iter(g.scores.values())) if s is not None]
        levels = [g.prompt.columns["level"] for g in own]
        metrics[f"gym/{task}/pass_rate"] = _mean([float(s >= threshold) for s in scores])
        metrics[f"gym/{task}/share"] = len(own) / len(groups)
        if None not in levels:
            metrics[f"gym/{task}/level"] = _mean(levels)
    return metrics


def standard_error(rewards: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean reward. It is computed over prompts, since the
    completions of a prompt are dependent."""
    means = [fmean(group) for group in rewards if group]
    return deviation(means) / math.sqrt(len(means)) if len(means) >= 2 else math.nan


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation with Bessel's correction; NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    mean = fmean(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % confidence interval of the mean of per-prompt values in [0, 1]. It is
    Wilson's interval, but with the number of Bernoulli draws of the same variance in place of the
    number of prompts. The interval is therefore also valid for values that are means over several
    samples, and it stays within [0, 1]."""
    n, mean = len(values), fmean(values)
    variance = deviation(values) ** 2 if n > 1 else 0.0
    if variance > 0:
        n = max(n, round(mean * (1 - mean) / (variance / n)))
    centre = (mean + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(mean * (1 - mean) / n + Z * Z / (4 * n * n))
    # Rounding must not place the mean outside its own interval.
    return [max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))]


def mean_intervals(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return 95 % intervals of the mean reward and of each function's mean, over the prompts."""
    values = {"reward": [g.rewards for g in groups]}
    for name in groups[0].scores:
        values[f"rewards/{name}/mean"] = [g.scores[name] for g in groups]
    found = {}
    for name, by_prompt in values.items():
        known = [[v for v in some if v is not None] for some in by_prompt]
        error, flat = standard_error(known), [v for some in known for v in some]
        if math.isfinite(error):
            centre = fmean(flat)
            found[f"{name}_interval"] = [centre - Z * error, centre + Z * error]
    return found


def window_mean(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over several steps, ignoring NaN."""
    names = dict.fromkeys(name for line in lines for name in line)
    means = {n: _mean([x[n] for x in lines if n in x and not math.isnan(x[n])]) for n in names}
    return {name: value for name, value in means.items() if not math.isnan(value)}


def sampled_entropy(logprobs: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return the mean of -log p over all sampled tokens, which needs no forward pass. If the policy
    was sampled without filters, the expectation of this mean is the policy's entropy."""
    values: list[float] = []
    count = 0
    for of_completion in logprobs:
        values += of_completion
        count += len(of_completion)
    return {"entropy": -math.fsum(values) / count} if count else {}


def _baselines(rewards: Sequence[float]) -> list[float]:
    total = math.fsum(rewards)
    return [(total - r) / (len(rewards) - 1) for r in rewards]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
