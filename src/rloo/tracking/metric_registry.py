"""The table of all metrics: unit, meaning, healthy range, and aggregation over ranks.

`python tools/metrics_page.py` generates docs/metrics.md from this table. The report draws the
healthy ranges, and alarms compare metrics with the ranges. This module does not import the code
that computes the metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

# Aggregation over ranks. "all": over the completions of all ranks, each counted once; "largest":
# the maximum over ranks; "main": the main rank's value; "same": equal on all ranks.
Ranks = Literal["all", "largest", "main", "same"]
# The better direction of a metric, if one is known.
Better = Literal["", "higher", "lower"]


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """The range from `low` to `high` (None: no limit) in which a metric is healthy. If `of_start`
    is true, both limits are multiples of the metric's value in the run's first steps. A value
    outside the range needs attention, but is not always a fault."""

    low: float | None = None
    high: float | None = None
    of_start: bool = False

    def bounds(self, start: float | None = None) -> tuple[float, float]:
        """Return the lowest and highest healthy value. The limits are infinite if `start` is needed
        and unknown."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not self.of_start:
            return low, high
        if start is None or not math.isfinite(start):
            return -math.inf, math.inf
        return low * start, high * start

    def holds(self, value: float, start: float | None = None) -> bool:
        """Whether the value is healthy; NaN is not healthy."""
        low, high = self.bounds(start)
        return low <= value <= high

    def __str__(self) -> str:
        unit = " times the start" if self.of_start else ""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}{unit}"
        if self.low is not None:
            return f"at least {self.low:g}{unit}"
        return "0" if self.high == 0 else f"at most {self.high:g}{unit}"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, one row of the table. `name` may contain a placeholder: `<function>` (a reward
    function's name), `<task>` (the name of a reasoning-gym task) or `<k>` (a number). `unit` is
    empty for a pure number. `meaning` is a plain sentence. `note` is text that a page adds to
    `meaning`."""

    name: str
    unit: str
    meaning: str
    band: HealthyRange | None = None
    better: Better = ""
    ranks: Ranks = "all"
    note: str = ""


NONE = HealthyRange(high=0.0)

ROLLOUT = (
    Metric("reward", "reward", "Mean of the weighted reward over all scored completions.",
        better="higher"),
    Metric("reward_std", "reward", "Standard deviation of the weighted reward."),
    Metric("reward/standard_error", "reward", "Standard error of `reward`.",
        note="It is the standard deviation of the means of the prompts / √prompts."),
    Metric("reward/unscored", "completions", "Completions that no reward function scored.",
        band=NONE, better="lower"),
    Metric("rewards/<function>/mean", "reward", "Mean of one reward function.",
        better="higher", note="Unweighted, over the completions that the function scored."),
    Metric("rewards/<function>/std", "reward", "Standard deviation of one reward function."),
    Metric("rewards/<function>/raw_mean", "reward",
        "Mean of a reward with `normalize: true`, before normalisation.", better="higher"),
    Metric("rewards/<function>/failed", "share",
        "Share of calls that missed the deadline, raised an error or returned no rewards.",
        band=NONE, better="lower", note="Only with `reward_on_error: missing`."),
    Metric("rewards/<function>/nan", "share",
        "Share of completions for which one function returned NaN, which is no reward.",
        band=NONE, better="lower", note="Absent if no reward was NaN."),
    Metric("rewards/math_reward/unjudged", "share",
        "Share of completions that `math` could not judge for a reason outside the completion.",
        band=HealthyRange(high=0.05), better="lower",
        note="A judge process was killed or stopped, or the call reached its time limit."),
    Metric("rewards/code_reward/unjudged", "share",
        "Share of completions that `code` could not judge for a reason outside the completion.",
        band=HealthyRange(high=0.05), better="lower",
        note="The sandbox failed three times in a row, or the row's tests cannot be run."),
    Metric("rewards/gym_reward/unjudged", "share",
        "Share of completions that a reasoning-gym scorer could not score.",
        band=HealthyRange(high=0.05), better="lower",
        note="The scorer raised an error, exceeded its time or memory, or the sandbox failed three "
        "times in a row."),
    Metric("groups/signal", "share",
        "Share of prompts whose completions differ in reward and so have a learning signal.",
        band=HealthyRange(low=0.25), better="higher",
        note="Over groups with at least two scores, before the KL penalty."),
    Metric("frac_reward_zero_std", "share",
        "Share of prompts whose completions all have the same reward: 1 − `groups/signal`.",
        band=HealthyRange(high=0.75), better="lower",
        note="TRL computes this metric after the KL penalty. The KL penalty makes it 0."),
    Metric("baseline/variance", "reward²", "Variance of the leave-one-out baselines."),
    Metric("completions/mean_length", "tokens", "Mean length of a completion.",
        note="The end-of-sequence token counts."),
    Metric("completions/min_length", "tokens", "Length of the shortest completion."),
    Metric("completions/max_length", "tokens", "Length of the longest completion."),
    Metric("completions/mean_terminated_length", "tokens",
        "Mean length of the completions that were not cut off.",
        note="Absent if all completions were cut off."),
    Metric("completions/min_terminated_length", "tokens",
        "Length of the shortest completion that was not cut off."),
    Metric("completions/max_terminated_length", "tokens",
        "Length of the longest completion that was not cut off."),
    Metric("completions/clipped_ratio", "share",
        "Share of completions that were cut off at `max_completion_length`.",
        band=HealthyRange(high=0.25), better="lower"),
    Metric("episodes/turns", "turns", "Mean number of the model's turns in an episode.",
        note="Only with tools, like all metrics of `episodes/` and `tools/`."),
    Metric("episodes/failed", "episodes",
        "Episodes without a reward, since they failed for a reason outside the model.",
        band=NONE, better="lower",
        note="An episode fails if it takes longer than `tool_kwargs.timeout`."),
    Metric("tools/call_frequency", "calls", "Mean number of tool calls in an episode."),
    Metric("tools/failure_frequency", "share",
        "Share of tool calls that were malformed, unknown, or raised an error.", better="lower",
        note="The model receives every error message."),
    Metric("tools/time", "s", "Seconds spent in tools, summed over the episodes.",
        better="lower", note="A part of `time/sample`. Waits of coroutines overlap."),
    Metric("tokens_per_second/sample", "tokens/s", "Completion tokens per second of sampling.",
        better="higher", ranks="main",
        note="Tokens of all processes divided by the main process's `time/sample`. In asynchronous "
        "runs the tokens are divided by the sampling time, since `time/sample` is the trainer's "
        "waiting time."),
    Metric("gym/<task>/pass_rate", "share",
        "Share of completions that pass, for the prompts of one task of `gym:NAME`.",
        better="higher", note="A completion passes if its first reward is at least "
        "`pass_threshold`, as in an evaluation. Completions without a reward do not count."),
    Metric("gym/<task>/share", "share", "Share of the prompts that belong to this task."),
    Metric("gym/<task>/level", "", "Mean level of this task's prompts.",
        note="Only with `dataset_kwargs.levels`."),
    Metric("prompt_sampling/effective_share", "share",
        "Effective sample size of the prompts' weights, as a share of the prompts.",
        band=HealthyRange(low=0.3), better="higher",
        note="(Σ weights)² / (prompts · Σ weights²). Only with `prompt_sampling variance`."),
    Metric("prompt_sampling/uniform_reward", "reward",
        "Estimate of `reward` for uniformly drawn prompts: a weighted mean over the drawn prompts.",
        better="higher",
        note="`reward` itself is the mean of the drawn prompts. Only with `prompt_sampling "
        "variance`."),
    Metric("prompt_sampling/uniform_signal", "share",
        "Estimate of `groups/signal` for uniformly drawn prompts: a weighted mean over the drawn "
        "prompts.", better="higher",
        note="`groups/signal` divided by this metric is the gain in groups with a signal. Only "
        "with `prompt_sampling variance`."),
    Metric("prompt_sampling/largest_group", "completions",
        "The largest number of completions of a prompt.",
        note="Equal to `num_generations`: the estimates do not distinguish the prompts. Only with "
        "`prompt_sampling_kwargs.max_generations`."),
    Metric("prompt_sampling/probe_explained", "share",
        "Share of the squared error of predicted mean rewards that the probe removes.",
        better="higher",
        note="Relative to the prior, on prompts whose rewards the probe had not seen. At most 1. "
        "Not above 0: the probe knows nothing, and is not used. Only with "
        "`prompt_sampling_kwargs.probe`."),
    Metric("prompt_sampling/probe_slope", "ratio",
        "Slope of the mean rewards over the probe's predictions, both relative to the prior.",
        note="1: the predictions are calibrated; below 1: they are too extreme. Only with "
        "`prompt_sampling_kwargs.probe`."),
    Metric("baseline/variance_ratio", "ratio",
        "Estimated variance of the gradient with the fitted baseline, relative to leave-one-out.",
        better="lower",
        note="The squared advantages of the last rollouts, weighted with squared score norms. Each "
        "rollout counts with the coefficients that it was trained with. Only with `estimator "
        "regression`."),
    Metric("dynamic_sampling/drawn_share", "ratio", "Prompts drawn for each prompt used.",
        better="lower", note="Only with `dynamic_sample`."),
    Metric("staleness/mean", "rollouts",
        "Rollouts by which the weights that sampled a token lag behind the trained weights.",
        note="Mean over all tokens of the rollout. Only in asynchronous runs. Counted in "
        "generation batches (`generation_batch_size`)."),
    Metric("staleness/max", "rollouts", "The same lag for the token with the oldest weights."),
    Metric("groups/first", "", "Index of the rollout's first prompt, in the order of drawing.",
        note="Only in asynchronous runs."),
    Metric("queue/done", "groups", "Prompts that are sampled and scored, and wait for training.",
        ranks="main", note="Measured when the rollout is requested. Only in asynchronous runs."),
    Metric("queue/in_flight", "groups", "Prompts that are being sampled or scored.",
        ranks="main", note="Measured when the rollout is requested. Only in asynchronous runs."),
    Metric("idle/trainer", "share", "Share of the time in which the trainer waited for groups.",
        better="lower", ranks="main",
        note="Measured since the last rollout. Only in asynchronous runs."),
    Metric("idle/sampler", "share", "Share of the time in which no completion was sampled.",
        better="lower", ranks="main",
        note="Measured since the last rollout. Only in asynchronous runs."),
    Metric("idle/rewards", "share",
        "Share of the time in which the reward processes were idle.",
        ranks="main", note="Measured since the last rollout. Only in asynchronous runs."),
    Metric("engine/lost", "times", "How often a sampling server or process was lost.",
        band=NONE, better="lower", ranks="main", note="Counted since the run started or resumed."),
    Metric("engine/returned", "times", "How often a lost server or process came back.",
        ranks="main"),
    Metric("engine/repeated", "times",
        "How many prompts were sampled again after the loss of a server or process.",
        better="lower", ranks="main"),
    Metric("engine/changed_share", "share",
        "Share of the exported weights that have changed since the version before.",
        ranks="main", note="Only if weights are sent as deltas."),
    Metric("engine/sent_bytes", "bytes", "Size of the last version of the weights.",
        ranks="main", note="Only if weights are sent as deltas."),
    Metric("scorers/lost", "times", "How often a reward process was lost.",
        band=NONE, better="lower", ranks="main",
        note="A lost process is restarted. Only in asynchronous runs."),
)  # fmt: skip

UPDATE = (
    Metric("kl", "nats/token", "KL divergence of the policy from the reference model, per token.",
        band=HealthyRange(high=1.0),
        note="Mean over tokens of log π − log π_ref (k1). If the KL is in the reward, π is the "
        "policy before the rollout's first update. With `preset trl` the mean leaves out "
        "completions that are masked as truncated, since they have no KL penalty. `kl/sequence` "
        "and `entropy` leave them out too."),
    Metric("kl/sequence", "nats", "KL divergence per completion. β multiplies this number.",
        note="Sum over the tokens of a completion, mean over completions."),
    Metric("kl/coef", "", "β in this step.", ranks="same", note="Only with `kl_kwargs.target`."),
    Metric("entropy", "nats/token",
        "Entropy of the policy at each token; near 0 all samples of a prompt are equal.",
        band=HealthyRange(low=0.05, high=3.0, of_start=True),
        note="Mean over tokens at the sampling temperature. If not all completions are computed, "
        "the value is the mean of the sampler's −log π over the sampled tokens. The expectation of "
        "this mean is the entropy of the policy that sampled. If no completion counts, the first "
        "step on a rollout has the mean over all sampled completions."),
    Metric("mismatch/mean", "nats",
        "Mean absolute difference of a token's log-prob between rollout engine and trainer.",
        band=HealthyRange(high=0.05), better="lower",
        note="Uses the policy log-probs of computed tokens. Valid only in the first step on a "
        "rollout, and with `max_staleness` only if `staleness/max` is 0. About 1e-6 in float32."),
    Metric("mismatch/max", "nats", "Largest of these differences of a token's log-prob.",
        better="lower", ranks="largest"),
    Metric("sampling/importance_sampling_ratio/mean", "ratio",
        "Mean importance-sampling weight, which corrects for the sampling distribution.",
        band=HealthyRange(0.8, 1.2),
        note="Weights by `rollout_importance_sampling_mode`, after truncation or masking, over "
        "computed completions."),
    Metric("sampling/importance_sampling_ratio/max", "ratio", "Largest importance-sampling weight.",
        ranks="largest"),
    Metric("sampling/effective_share", "share",
        "Effective sample size under the importance-sampling weights, as a share.",
        band=HealthyRange(low=0.5), better="higher",
        note="(Σw)² / (n Σw²) over the n computed completions, where w is the mean weight of a "
        "completion's tokens."),
    Metric("clip_ratio/low_mean", "share",
        "Share of ratios clipped at the lower bound, which needs a negative advantage.",
        note="Ratios of completions or of tokens (`importance_sampling_level`). A ratio with an "
        "advantage of 0 is not clipped."),
    Metric("clip_ratio/high_mean", "share",
        "Share of ratios clipped at the upper bound, which needs a positive advantage."),
    Metric("clip_ratio/region_mean", "share",
        "Share of ratios that were clipped: `low_mean` plus `high_mean`.",
        band=HealthyRange(high=0.2)),
    Metric("aux_loss", "", "Load-balancing loss of a mixture of experts.",
        note="Without the factor `router_aux_loss_coef`, mean over input tokens. In perfect "
        "balance the value is the number of experts per token."),
    Metric("loss", "", "Policy-gradient loss. It does not measure progress."),
    Metric("grad_norm", "", "Norm of the gradient before clipping.",
        note="A log of several steps has the norm of the last step, as in transformers' Trainer."),
    Metric("learning_rate", "", "Learning rate of the step.", ranks="same"),
    Metric("update/changed_share", "share", "Share of parameters that the step changed.",
        band=HealthyRange(low=0.01),
        note="Measured on up to 1,024 parameters per tensor. Few change if the step is smaller "
        "than the precision of the weights. None change while the learning rate is 0."),
    Metric("update/computed_share", "share",
        "Completions that the update computed / completions that count."),
    Metric("update/no_signal", "0 or 1",
        "1 if no completion of the step had a signal. The weights then did not change.",
        band=NONE, better="lower"),
    Metric("update/nonfinite", "0 or 1",
        "1 if the gradient was not finite. The step was then skipped.",
        band=NONE, better="lower"),
    Metric("update/scale_lowered", "0 or 1",
        "1 if fp16's loss scale was too high. The step was skipped and the scale halved."),
    Metric("update/max_tokens", "tokens",
        "New token budget of a micro-batch, in the first step with the lower budget.",
        ranks="same"),
    Metric("step", "", "Number of optimizer steps, including this step.", ranks="same"),
    Metric("epoch", "", "Passes over the dataset.", ranks="same"),
    Metric("num_tokens", "tokens", "Tokens of prompts and completions so far."),
    Metric("step_time", "s", "Seconds that the step took.", better="lower", ranks="main"),
    Metric("wall_time", "s", "Seconds of the run until the end of the step.", ranks="main",
        note="Evaluations and checkpoints are included, pauses between sessions are not."),
    Metric("time/sample", "s", "Seconds spent sampling.", better="lower", ranks="main",
        note="In asynchronous runs: time of waiting for samples."),
    Metric("time/probe", "s", "Seconds spent in forward passes of candidates.", better="lower",
        ranks="main", note="Only with `prompt_sampling_kwargs.probe`."),
    Metric("time/reward", "s", "Seconds spent in reward functions.", better="lower", ranks="main"),
    Metric("time/credit", "s", "Seconds spent computing advantages.", better="lower", ranks="main"),
    Metric("time/update", "s", "Seconds spent in forward and backward passes and the optimizer.",
        better="lower", ranks="main"),
    Metric("rank/imbalance", "ratio",
        "Largest number of input tokens of a process in this update, divided by the mean.",
        band=HealthyRange(high=1.5), better="lower", note="Only with several processes."),
    Metric("rank/wait_time", "s", "Seconds that the main process waited for other processes.",
        better="lower", ranks="main", note="Only with several processes."),
    Metric("rank/gathered_bytes", "bytes",
        "Bytes that the main process received from the other processes, with padding.",
        ranks="main", note="Gradients do not count. Only with several processes."),
)  # fmt: skip

EVALUATION = (
    Metric("name", "", "Time of the evaluation: `start`, `during`, `end` or `best`.", ranks="same"),
    Metric("dataset", "", "Name of the evaluation set, if there are several.", ranks="same"),
    Metric("step", "", "Number of optimizer steps before the evaluation.", ranks="same"),
    Metric("num_prompts", "prompts", "Prompts of the evaluation set.", ranks="same"),
    Metric("num_samples", "completions", "Completions sampled per prompt (`num_generations_eval`).",
        ranks="same"),
    Metric("pass@<k>", "share", "Probability that at least one of k completions passes.",
        better="higher",
        note="The unbiased estimate of Chen et al. 2021 from `num_samples` completions. A "
        "completion passes if its first reward is at least `pass_threshold`."),
    Metric("pass@1_greedy", "share",
        "Share of prompts whose greedy completion passes (the most likely token at each step).",
        better="higher"),
    Metric("pass@<k>_interval", "share", "Wilson's 95 % interval of `pass@<k>` over the prompts."),
    Metric("pass@1_greedy_interval", "share", "Wilson's 95 % interval of `pass@1_greedy`."),
    Metric("reward_kind", "", "Kind of the first reward: `0 or 1`, or `graded`.", ranks="same",
        note="For a graded reward without a `pass_threshold`, the mean reward is more informative "
        "than pass@k."),
    Metric("reward_interval", "reward", "95 % interval of `reward` over the prompts."),
    Metric("rewards/<function>/mean_interval", "reward",
        "95 % interval of `rewards/<function>/mean`."),
    Metric("rewards/<function>/win_rate", "share",
        "Share of completions that are better than the starting policy's. A tie counts half.",
        better="higher",
        note="Judged by a reward of `eval_reward_funcs` or a pairwise judge. Compared are "
        "completions with the same prompt and index. Needs `eval_on_start`."),
    Metric("rewards/<function>/win_rate_interval", "share", "95 % interval of the win rate."),
    Metric("loss", "",
        "Minus the mean leave-one-out advantage: 0 up to rounding for any policy, as in TRL."),
)  # fmt: skip

TOTALS = (
    Metric("train_loss", "", "Mean of `loss` over the steps of this session."),
    Metric("train_runtime", "s", "Duration of this session.", ranks="main"),
    Metric("train_samples_per_second", "1/s", "Completions / `train_runtime`.", better="higher"),
    Metric("train_steps_per_second", "1/s", "Optimizer steps / `train_runtime`.", better="higher"),
)  # fmt: skip

PARTS = {"rollout": ROLLOUT, "update": UPDATE, "evaluation": EVALUATION, "totals": TOTALS}


def of_steps() -> Iterator[Metric]:
    """Yield the metrics of a row of metrics.jsonl, except those that reward functions log."""
    yield from (*ROLLOUT, *UPDATE)


@cache
def find(name: str) -> Metric | None:
    """Return the row for a metric's name in metrics.jsonl, evaluations.jsonl or a log, where the
    name may start with `eval_`. None for a metric that a reward function logged."""
    rows = [row for part in PARTS.values() for row in part]
    for row in sorted(rows, key=lambda row: row.name.count("<")):  # exact names first
        pattern = re.escape(row.name).replace("<function>", ".+").replace("<k>", r"\d+")
        pattern = pattern.replace("<task>", r"\w+")
        if re.fullmatch(pattern, name.removeprefix("eval_")):
            return row
    return None
