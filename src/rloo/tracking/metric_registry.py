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
    """A metric is healthy from `low` to `high` (None: no limit). With `of_start` both limits are
    multiples of the metric's value in the run's first steps. A value outside the range needs
    attention, but is not always a fault."""

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
    """One row of the table. `name` may contain `<function>`, a reward function's name, `<task>`,
    the name of a reasoning-gym task, or `<k>`, a number. `unit` is empty for a pure number.
    `meaning` is a plain sentence. `note` is text that a page adds to `meaning`."""

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
        note="It is the deviation of the prompts' means / √prompts."),
    Metric("reward/unscored", "completions", "Completions that no reward function scored.",
        band=NONE, better="lower"),
    Metric("rewards/<function>/mean", "reward", "Mean of what one reward function gave.",
        better="higher", note="Unweighted, over the completions that it scored."),
    Metric("rewards/<function>/std", "reward", "Standard deviation of what one function gave."),
    Metric("rewards/<function>/raw_mean", "reward",
        "Mean of a reward with `normalize: true`, before normalisation.", better="higher"),
    Metric("rewards/<function>/failed", "share",
        "Share of calls that missed the deadline, raised or returned no rewards.",
        band=NONE, better="lower", note="With `reward_on_error: missing`."),
    Metric("rewards/<function>/nan", "share",
        "Share of completions for which one function returned NaN, which is no reward.",
        band=NONE, better="lower", note="Absent if there were none."),
    Metric("rewards/math_reward/unjudged", "share",
        "Share of completions that `math` could not judge through no fault of theirs.",
        band=HealthyRange(high=0.05), better="lower",
        note="A judge was killed or stopped, or the time of the call was over."),
    Metric("rewards/code_reward/unjudged", "share",
        "Share of completions that `code` could not judge through no fault of theirs.",
        band=HealthyRange(high=0.05), better="lower",
        note="The sandbox failed three times in a row, or the row's tests cannot be run."),
    Metric("rewards/gym_reward/unjudged", "share",
        "Share of completions that a scorer of reasoning-gym has failed on.",
        band=HealthyRange(high=0.05), better="lower",
        note="It raised, took too long or too much memory, or the sandbox failed three times in a "
        "row."),
    Metric("groups/signal", "share",
        "Share of prompts whose completions differ in reward, so that there is something to learn.",
        band=HealthyRange(low=0.25), better="higher",
        note="Over groups with at least two scores, before the KL penalty."),
    Metric("frac_reward_zero_std", "share",
        "Share of prompts whose completions all have the same reward: 1 − `groups/signal`.",
        band=HealthyRange(high=0.75), better="lower",
        note="TRL computes it after the KL penalty, which makes it 0."),
    Metric("baseline/variance", "reward²", "Variance of the leave-one-out baselines."),
    Metric("completions/mean_length", "tokens", "Mean length of a completion.",
        note="The end-of-sequence token counts."),
    Metric("completions/min_length", "tokens", "Length of the shortest completion."),
    Metric("completions/max_length", "tokens", "Length of the longest completion."),
    Metric("completions/mean_terminated_length", "tokens",
        "Mean length of the completions that ended by themselves.", note="Absent if none did."),
    Metric("completions/min_terminated_length", "tokens",
        "Length of the shortest completion that ended by itself."),
    Metric("completions/max_terminated_length", "tokens",
        "Length of the longest completion that ended by itself."),
    Metric("completions/clipped_ratio", "share",
        "Share of completions that were cut off at `max_completion_length`.",
        band=HealthyRange(high=0.25), better="lower"),
    Metric("episodes/turns", "turns", "How often the model spoke in an episode, in the mean.",
        note="With tools, as the others of `episodes/` and `tools/`."),
    Metric("episodes/failed", "episodes",
        "Episodes that failed through no fault of the model's, and have no reward.",
        band=NONE, better="lower", note="They took longer than `tool_kwargs.timeout`."),
    Metric("tools/call_frequency", "calls", "Tool calls in an episode, in the mean."),
    Metric("tools/failure_frequency", "share",
        "Share of tool calls that were malformed, unknown, or raised an error.", better="lower",
        note="The model gets each error."),
    Metric("tools/time", "s", "Seconds spent in tools, added up over the episodes.",
        better="lower", note="A part of `time/sample`; coroutines wait at the same time."),
    Metric("tokens_per_second/sample", "tokens/s", "Completion tokens per second of sampling.",
        better="higher", ranks="main",
        note="All processes' tokens over the main one's `time/sample`. In asynchronous runs "
        "`time/sample` is the trainer's waiting time, so they are over the time of sampling."),
    Metric("gym/<task>/pass_rate", "share",
        "Share of the completions that pass, over the prompts of one task of `gym:NAME`.",
        better="higher", note="As in an evaluation: the first reward is at least `pass_threshold`. "
        "Those without a reward do not count."),
    Metric("gym/<task>/share", "share", "Share of the prompts that are of this task."),
    Metric("gym/<task>/level", "", "Mean level of this task's prompts.",
        note="With `dataset_kwargs.levels`."),
    Metric("dynamic_sampling/drawn_share", "ratio", "Prompts drawn for each prompt used.",
        better="lower", note="With `dynamic_sample`."),
    Metric("staleness/mean", "rollouts",
        "How much older the weights that sampled a token are than those that are trained.",
        note="In asynchronous runs; over all tokens of the rollout."),
    Metric("staleness/max", "rollouts", "How much older they are for the oldest token."),
    Metric("groups/first", "", "Number of the rollout's first prompt, in the order of drawing.",
        note="In asynchronous runs."),
    Metric("queue/done", "groups", "Prompts that are sampled and scored, and wait to be trained.",
        ranks="main", note="In asynchronous runs, when the rollout is requested."),
    Metric("queue/in_flight", "groups", "Prompts that are being sampled or scored.",
        ranks="main", note="In asynchronous runs, when the rollout is requested."),
    Metric("idle/trainer", "share", "Share of the time in which the trainer waited for groups.",
        better="lower", ranks="main", note="In asynchronous runs, since the last rollout."),
    Metric("idle/sampler", "share", "Share of the time in which nothing was sampled.",
        better="lower", ranks="main", note="In asynchronous runs, since the last rollout."),
    Metric("idle/rewards", "share",
        "Share of the time in which reward processes had nothing to do.",
        ranks="main", note="In asynchronous runs, since the last rollout."),
    Metric("engine/lost", "times", "How often a server or process that samples was lost.",
        band=NONE, better="lower", ranks="main", note="Since the run started or resumed."),
    Metric("engine/returned", "times", "How often one that was lost came back.", ranks="main"),
    Metric("engine/repeated", "times", "How many prompts were sampled again after a loss.",
        better="lower", ranks="main"),
    Metric("scorers/lost", "times", "How often a process that calls rewards was lost.",
        band=NONE, better="lower", ranks="main", note="In asynchronous runs; it is restarted."),
)  # fmt: skip

UPDATE = (
    Metric("kl", "nats/token", "How far the policy is from the reference model, per token.",
        band=HealthyRange(high=1.0),
        note="Mean over tokens of log π − log π_ref (k1), with π before the rollout's first update "
        "if the KL is in the reward. `preset trl` leaves out completions masked as truncated, "
        "which pay no KL there. The same holds for `kl/sequence` and `entropy`."),
    Metric("kl/sequence", "nats", "The same for a completion: the number that β multiplies.",
        note="The sum over its tokens, mean over completions."),
    Metric("kl/coef", "", "β in this step.", ranks="same", note="With `kl_kwargs.target`."),
    Metric("entropy", "nats/token",
        "How undecided the policy is at each token; near 0 it always writes the same.",
        band=HealthyRange(low=0.05, high=3.0, of_start=True),
        note="Mean over tokens at the sampling temperature. If not all completions are computed, "
        "it is the sampler's mean of −log π over the sampled tokens. On average that is the "
        "entropy of the policy that sampled. If no completion counts, it is over all that were "
        "sampled, in the first step on a rollout."),
    Metric("mismatch/mean", "nats",
        "Mean difference of a token's log-prob between the engine that sampled and the trainer.",
        band=HealthyRange(high=0.05), better="lower",
        note="Absolute, of policy log-probs, over computed tokens. Meaningful in the first step on "
        "a rollout, and with `max_staleness` if `staleness/max` is 0. In float32 about 1e-6."),
    Metric("mismatch/max", "nats", "Difference for the token where it is largest.",
        better="lower", ranks="largest"),
    Metric("sampling/importance_sampling_ratio/mean", "ratio",
        "Mean weight that corrects for having sampled from another distribution.",
        band=HealthyRange(0.8, 1.2),
        note="By `rollout_importance_sampling_mode`, after truncating or dropping, over computed "
        "completions."),
    Metric("sampling/importance_sampling_ratio/max", "ratio", "The largest of these weights.",
        ranks="largest"),
    Metric("sampling/effective_share", "share",
        "Share of the completions that still counts after these weights.",
        band=HealthyRange(low=0.5), better="higher",
        note="(Σw)² / (n Σw²) over the n computed completions, w the mean of the weights over the "
        "completion's tokens."),
    Metric("clip_ratio/low_mean", "share",
        "Share of ratios clipped from below, where the advantage is negative.",
        note="Ratios of completions, or of tokens; without an advantage nothing is clipped."),
    Metric("clip_ratio/high_mean", "share",
        "Share of ratios clipped from above, where the advantage is positive."),
    Metric("clip_ratio/region_mean", "share", "Share of ratios that were clipped: their sum.",
        band=HealthyRange(high=0.2)),
    Metric("aux_loss", "", "Balancing loss of a mixture of experts.",
        note="Before `router_aux_loss_coef`, as a mean over input tokens; in perfect balance it is "
        "the number of experts per token."),
    Metric("loss", "", "Loss of the policy gradient, which does not measure progress."),
    Metric("grad_norm", "", "Norm of the gradient before clipping.",
        note="A log over several steps has that of the last step, as with Trainer."),
    Metric("learning_rate", "", "Learning rate of the step.", ranks="same"),
    Metric("update/changed_share", "share", "Share of parameters that the step changed.",
        band=HealthyRange(low=0.01),
        note="Over up to 1,024 per tensor. Few change if steps are smaller than the weights' "
        "precision; none while the learning rate is 0."),
    Metric("update/computed_share", "share",
        "Completions that the update computed, of those that count."),
    Metric("update/no_signal", "0 or 1",
        "1 if no completion of the step had a signal, so that the weights did not change.",
        band=NONE, better="lower"),
    Metric("update/nonfinite", "0 or 1",
        "1 if the gradient was not finite, so that the step was refused.",
        band=NONE, better="lower"),
    Metric("update/scale_lowered", "0 or 1",
        "1 if fp16's loss scale was too high, so that the step was skipped and the scale halved."),
    Metric("update/max_tokens", "tokens",
        "The new token budget of a micro-batch, in the step from which it was lowered.",
        ranks="same"),
    Metric("step", "", "Optimizer steps made, this one included.", ranks="same"),
    Metric("epoch", "", "Passes over the dataset.", ranks="same"),
    Metric("num_tokens", "tokens", "Tokens of prompts and completions so far."),
    Metric("step_time", "s", "Seconds that the step took.", better="lower", ranks="main"),
    Metric("time/sample", "s", "Seconds spent sampling.", better="lower", ranks="main",
        note="In asynchronous runs: waiting for samples."),
    Metric("time/reward", "s", "Seconds spent in reward functions.", better="lower", ranks="main"),
    Metric("time/credit", "s", "Seconds spent computing advantages.", better="lower", ranks="main"),
    Metric("time/update", "s", "Seconds spent in forward and backward passes and the optimizer.",
        better="lower", ranks="main"),
    Metric("rank/imbalance", "ratio",
        "Input tokens of the process that has most in this update, over the mean.",
        band=HealthyRange(high=1.5), better="lower", note="With several processes."),
    Metric("rank/wait_time", "s", "Seconds that the main process waited for the others.",
        better="lower", ranks="main", note="With several processes."),
    Metric("rank/gathered_bytes", "bytes", "Bytes that the main process gathered from all.",
        ranks="main", note="With several processes; not those of the gradients."),
)  # fmt: skip

EVALUATION = (
    Metric("name", "", "When it was made: `start`, `during`, `end` or `best`.", ranks="same"),
    Metric("dataset", "", "On which of several sets.", ranks="same"),
    Metric("step", "", "After how many steps.", ranks="same"),
    Metric("num_prompts", "prompts", "Prompts of the set.", ranks="same"),
    Metric("num_samples", "completions", "Completions drawn of each (`num_generations_eval`).",
        ranks="same"),
    Metric("pass@<k>", "share", "How often at least one of k completions passes.", better="higher",
        note="The unbiased estimate of Chen et al. 2021 from `num_samples` completions; one "
        "passes if the first reward function gives it at least `pass_threshold`."),
    Metric("pass@1_greedy", "share",
        "How often the greedy completion passes (the most likely token at each position).",
        better="higher"),
    Metric("pass@<k>_interval", "share", "Wilson's interval at 95 % over the prompts."),
    Metric("pass@1_greedy_interval", "share", "The same of `pass@1_greedy`."),
    Metric("reward_kind", "", "Kind of the first reward: `0 or 1`, or `graded`.", ranks="same",
        note="For a graded one without its own `pass_threshold` the mean reward says more than "
        "pass@k."),
    Metric("reward_interval", "reward", "Interval of `reward` at 95 % over the prompts."),
    Metric("rewards/<function>/mean_interval", "reward",
        "The same of the mean of one reward function."),
    Metric("rewards/<function>/win_rate", "share",
        "How often a completion is better than that of the starting policy, ties counting half.",
        better="higher",
        note="By a reward of `eval_reward_funcs`, or a pairwise judge, for completions with the "
        "same prompt and number. Needs `eval_on_start`."),
    Metric("rewards/<function>/win_rate_interval", "share", "Its interval at 95 %."),
    Metric("loss", "",
        "Minus the mean leave-one-out advantage: 0 up to rounding for any policy, as in TRL."),
)  # fmt: skip

TOTALS = (
    Metric("train_loss", "", "Mean of `loss` over the steps of this session."),
    Metric("train_runtime", "s", "Seconds.", ranks="main"),
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
