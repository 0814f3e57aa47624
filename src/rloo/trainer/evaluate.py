"""Measures held-out accuracy with the engine and rewards of training, with confidence intervals.

Every evaluation samples with the same noise, which training does not use. Evaluations do not affect
training. Two evaluations of a run differ only because the policy differs.
"""

from __future__ import annotations

import dis
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerState

from rloo.algorithm.baselines import subtract_baseline
from rloo.algorithm.rank_rollout import RewardScorer, generate_on_ranks
from rloo.config.config import RLOOConfig
from rloo.engines.counter_rng import noise_key
from rloo.model.policy import Policy
from rloo.model.training_state import capture_rng, restore_rng
from rloo.rewards import RewardSet
from rloo.rewards.reward_function import read_signature
from rloo.tracking.metrics import interval, mean_intervals, rollout_metrics, task_metrics
from rloo.tracking.summary_text import GRADED
from rloo.trainer.build import make_sampling
from rloo.trainer.eval_rewards import EvalRewards
from rloo.types import Completion, Engine, Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The sampling and the pass criterion of an evaluation. A completion passes if its first reward
    is at least `pass_threshold`. A completion without a score does not pass."""

    sampling: Sampling
    num_samples: int
    noise: int
    pass_threshold: float
    pass_k: Sequence[int] = (1,)


def settings_of(policy: Policy) -> EvaluationSettings:
    """The evaluation settings of a policy's options. The noise is the same in every evaluation."""
    config = policy.config
    return EvaluationSettings(
        make_sampling(config, policy.stop_token_ids, policy.tokenizer, evaluation=True),
        config.num_generations_eval or config.num_generations,
        noise_key(config.seed, "eval", 0),
        config.eval_options.pass_threshold,
        config.eval_options.pass_k,
    )


def evaluate(
    engine: Engine, prompts: Sequence[Prompt], judge: RewardScorer, settings: EvaluationSettings
) -> tuple[dict[str, Any], list[Group]]:
    """Evaluate on `prompts`. Return the metrics (sampled and greedy accuracy, pass@k, mean reward,
    lengths) and the sampled groups. `*_interval` are 95 % intervals over the prompts.
    `reward_kind`, the kind of the first reward, is "0 or 1" or `graded`. Raises ValueError if a k
    of pass@k exceeds the number of samples."""
    num_samples, threshold = settings.num_samples, settings.pass_threshold
    if (most := max(settings.pass_k)) > num_samples:
        raise ValueError(
            f"pass@{most} needs {most} samples per prompt; there are {num_samples} "
            "(num_generations_eval, eval_kwargs.pass_k)"
        )

    def measure(how: Sampling, count: int) -> tuple[list[Group], dict[str, float]]:
        sampled = generate_on_ranks(engine, prompts, count, how, settings.noise, judge.world)
        return judge.score(prompts, sampled, learn=False)

    groups, logged = measure(settings.sampling, num_samples)
    greedy, _ = measure(replace(settings.sampling, greedy=True), 1)
    passes = {
        f"pass@{k}": [pass_at_k(_passed(g, threshold), num_samples, k) for g in groups]
        for k in settings.pass_k
    }
    passes["pass@1_greedy"] = [float(_passed(g, threshold)) for g in greedy]
    report: dict[str, Any] = {"num_prompts": len(prompts), "num_samples": num_samples}
    for name, chances in passes.items():
        report |= {name: fmean(chances), f"{name}_interval": interval(chances)}
    report["reward_kind"] = kind_of(groups, threshold)
    report |= task_metrics(groups, threshold)
    return report | rollout_metrics(groups) | mean_intervals(groups) | logged, groups


def kind_of(groups: Sequence[Group], threshold: float) -> str:
    """The kind of the first reward: "0 or 1" if pass@k is meaningful, else `graded`. pass@k is
    meaningful if all values are 0 or 1, if all are -1 or 1, or if the threshold is not 1."""
    given = {score for g in groups for score in next(iter(g.scores.values()))} - {None}
    binary = given <= {0.0, 1.0} or given <= {-1.0, 1.0}
    return "0 or 1" if binary or threshold != 1.0 else GRADED


def pass_at_k(num_passed: int, num_samples: int, k: int) -> float:
    """The probability that k of the samples, chosen without replacement, include at least one that
    passed: the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1)."""
    failed = num_samples - num_passed
    return 1.0 - math.comb(failed, k) / math.comb(num_samples, k)


def _passed(group: Group, threshold: float) -> int:
    first = next(iter(group.scores.values()))
    return sum(score is not None and score >= threshold for score in first)


# Evaluation sets by name; the name of a single set is "".
Sets = Mapping[str, Sequence[Prompt]]
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the policy during training. Random generators and training state do not change."""

    policy: Policy
    engine: Engine
    rewards: RewardSet
    state: TrainerState
    judging: EvalRewards

    def measure(self, sets: Sets) -> Results:
        """The metrics of each set; see `evaluate`."""
        policy, settings = self.policy, settings_of(self.policy)
        judge = RewardScorer(
            self.rewards, policy.tokenizer, policy.world, self.state, settings.noise
        )
        generators = capture_rng()  # reward functions may use them
        results = {}
        try:
            policy.load_into(self.engine)
            for name, prompts in sets.items():
                results[name], groups = evaluate(self.engine, prompts, judge, settings)
                results[name]["loss"] = loss_of(groups)
                step = self.state.global_step
                results[name] |= self.judging.measure(name, groups, judge, step)
        finally:
            restore_rng(generators)
        return results


def loss_of(groups: Sequence[Group]) -> float:
    """The loss that TRL reports for an evaluation: minus the mean of the leave-one-out advantages.
    All ratios are 1, since the same weights sampled the completions. The advantages of a group sum
    to 0. The loss is therefore 0 up to rounding and does not measure the policy."""
    rewards = [math.nan if r is None else r for group in groups for r in group.rewards]
    numbers = [number for number, group in enumerate(groups) for _ in group.rewards]
    return 0.0 - float(subtract_baseline(torch.tensor(rewards), torch.tensor(numbers)).mean())


def flatten(results: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """The metrics of all sets in one dict. A name is `prefix_metric`, or `prefix_set_metric` if the
    set has a name."""
    return {
        "_".join(part for part in (prefix, name, metric) if part): value
        for name, metrics in results.items()
        for metric, value in metrics.items()
    }


def is_better(state: TrainerState, metrics: Mapping[str, Any], config: RLOOConfig) -> bool:
    """Whether this evaluation is better than all previous ones; if so, its value and step are
    stored in `state`. The metric is `metric_for_best_model`, by default `eval_reward`. If the
    default metric is missing (several evaluation sets), the result is False. Any other missing
    metric raises ValueError."""
    name = "eval_" + (config.metric_for_best_model or "reward").removeprefix("eval_")
    if name not in metrics:
        if config.metric_for_best_model is None:
            return False
        known = ", ".join(key for key, value in metrics.items() if isinstance(value, float))
        raise ValueError(
            f"the evaluation has no metric {name}; it has {known} (metric_for_best_model)"
        )
    value, best = float(metrics[name]), state.best_metric
    sign = -1 if config.greater_is_better is False else 1
    # NaN (no completion was scored) is not better than anything.
    if math.isnan(value) or (best is not None and sign * value <= sign * best):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def check_evaluation(owner: Any, sets: Sets, *, trains: bool) -> list[str]:
    """Check the evaluation `sets` of the trainer `owner`; return a note if training does not use
    them. Raises ValueError if an evaluation is requested and there is no set, and if no set has the
    metric for the best model."""
    args: RLOOConfig = owner.args
    evaluates = args.eval_on_start or args.eval_strategy != "no"
    if evaluates and not sets:
        raise ValueError(
            "evaluation is asked for (eval_on_start, eval_strategy) and there is nothing to "
            "evaluate on; name a held-out file (eval_dataset), or a split of the dataset, such as "
            "train[90%:] with dataset_split train[:90%] (eval_split)"
        )
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    names = [name for name in sets if name]
    if metric in ("loss", *(f"{name}_loss" for name in names)):
        raise ValueError(
            f"metric_for_best_model is {metric}, which is 0 in every evaluation, since the "
            "advantages of a group add up to 0; take reward or pass@1 (metric_for_best_model)"
        )
    if metric and names and not any(metric.startswith(f"{name}_") for name in names):
        raise ValueError(
            f"metric_for_best_model is {metric} and the evaluation sets are "
            f"{', '.join(names)}; prefix it with one of them, as in {names[0]}_{metric}"
        )
    if metric and sets and (known := _known_metrics(owner)) is not None:
        name = next((n for n in names if metric.startswith(f"{n}_")), "")
        bare = metric.removeprefix(f"{name}_")
        if bare not in known and not bare.startswith("gym/"):
            raise ValueError(
                f"metric_for_best_model is {args.metric_for_best_model}, which no evaluation has; "
                f"it has {', '.join(sorted(known))} (metric_for_best_model)"
            )
    if sets and trains and not evaluates:
        return ["the evaluation set is not used while training (eval_on_start, eval_strategy)"]
    return []


def _known_metrics(owner: Any) -> set[str] | None:
    """The names of the metrics of an evaluation. None if the names are not known in advance: a
    reward that logs, a judge, episodes or a subclass may add metrics."""
    rewards: RewardSet = owner.rewards
    judged = owner.judging.rewards is not None or owner.judging.pairwise
    overridden = type(owner).evaluate.__qualname__ != "RLOOTrainer.evaluate"
    episodes = owner.turns.tools or owner.turns.rollout_func is not None
    if any(map(_may_log, rewards.functions)) or judged or overridden or episodes:
        return None
    one = Completion([0], "stop", [0.0], [0.0])
    scores: dict[str, list[float | None]] = {name: [0.0, 1.0] for name in rewards.names}
    group = Group(Prompt(0, [0], ""), [one, one], ["", ""], [0.0, 1.0], scores)
    passes = [f"pass@{k}" for k in owner.args.eval_options.pass_k]
    return {*passes, "pass@1_greedy", *rollout_metrics([group])}


def _may_log(function: Callable[..., Any]) -> bool:
    """Whether a reward function may log a metric. This is true if it has the parameter
    `log_metric`; if it has **kwargs, and uses the name `log_metric` or passes **kwargs on; or if
    its code cannot be inspected."""
    accepts = read_signature(function, "", 1.0).accepts
    if accepts is not None:
        return "log_metric" in accepts
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    used = list(dis.get_instructions(code))
    return any(i.argval == "log_metric" or i.opname == "CALL_FUNCTION_EX" for i in used)
