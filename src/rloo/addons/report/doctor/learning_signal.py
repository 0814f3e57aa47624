"""Rules on rewards without a learning signal, and on steps that changed no weight."""

from __future__ import annotations

import math
from statistics import pstdev
from typing import Any

from rloo.addons.report.doctor.data_rules import many_cut
from rloo.addons.report.doctor.run_record import (
    CLIPPED_REWARD,
    COLD_START,
    HUGE_REWARD,
    SMALL_RATE,
    RecordedRun,
    Row,
    Rule,
    RuleResult,
    band,
    excerpts,
    functions,
    highest_rate,
    largest_reward,
    longer_by,
    mean,
)
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import percent
from rloo.tracking.finding import text_of_content
from rloo.tracking.metrics import Z

# With fewer groups or completions, all of them may be equal by chance.
FEWEST_GROUPS, FEWEST_SOLVED = 10, 16
# Share of completions without a reward, or of failed calls.
MANY_MISSING = 0.2
# Fewest recorded completions for a meaningful share.
FEWEST = 12
# Sampling is nearly greedy below this entropy (nats per token) and this temperature.
ALIKE, COLD = 0.1, 0.5
# Standard deviation of rewards, relative to their mean, below which only noise separates
# completions.
NOISE = 2e-3
# Learning rate from which on no precision rounds a step away.
NOT_ROUNDED = 1e-4
# Mean reward (0 to 1) above which little is left to learn.
SOLVED = 0.95


def _missing(run: RecordedRun) -> RuleResult | None:
    rollouts = run.rollouts
    unscored = [row for row in rollouts if math.isnan(row["reward"])]
    if not unscored or not math.isnan(mean(run.end, "reward")):
        return None
    what = _what_is_missing(unscored)
    return RuleResult(
        f"in {len(unscored)} of {counted(len(rollouts), 'rollout')} no completion got a reward: "
        f"{what}",
        "call the reward function on two recorded completions by hand and print what it returns",
        examples=excerpts(run.texts(last=True)),
    )


def _what_is_missing(rows: list[Row]) -> str:
    said = []
    for name in functions(rows):
        nan, failed = mean(rows, f"rewards/{name}/nan"), mean(rows, f"rewards/{name}/failed")
        if nan > 0:
            said.append(f"{name} returned NaN for {percent(nan)}")
        elif failed > 0:
            said.append(f"{percent(failed)} of the calls of {name} failed")
        else:
            said.append(f"{name} returned None")
    return ", ".join(said) or "every function returned None"


def _equal(run: RecordedRun, *, zero: bool) -> RuleResult | None:
    rewards = [row["reward"] for row in run.rollouts]
    spread = [row.get("reward_std", math.nan) for row in run.rollouts]
    both = zip(spread, rewards, strict=True)
    if not rewards or not all(s <= 1e-9 * max(1.0, abs(r)) for s, r in both):
        return None
    if max(rewards) - min(rewards) > 1e-9 or (rewards[0] == 0.0) != zero:
        return None
    evidence = f"all rewards of {counted(len(rewards), 'rollout')} were {rewards[0]:g}"
    if zero:
        change = (
            "score a completion that you know to be right by hand: if that is 0 too the reward "
            "cannot read it; else the model finds none (a cold start): train it with examples "
            "first, begin with easier prompts, or give a partial reward"
        )
    else:
        change = (
            "make the reward tell completions of one prompt apart; if all of them are right, take "
            "harder prompts; if they are one text, sample at a higher temperature"
        )
    return RuleResult(evidence, change, examples=excerpts(run.texts(last=True)))


def _alike(run: RecordedRun) -> RuleResult | None:
    rows = [row for row in run.rollouts if math.isfinite(row["reward"])]
    spread = [row.get("reward_std", math.nan) for row in rows]
    level = max((abs(row["reward"]) for row in rows), default=0.0)
    if not spread or not all(s <= NOISE * level for s in spread) or not max(spread) > 0:
        return None
    if run.gained or run.change("reward").moved == -1:
        return None
    return RuleResult(
        f"rewards deviate by {max(spread):.2g} at most around a mean of "
        f"{mean(rows, 'reward'):.6g} in {counted(len(rows), 'rollout')}: what is trained on is "
        "their last digits",
        "print the rewards of two recorded completions of which one is better, and make the "
        "reward tell them apart; if completions are alike, sample at a higher temperature, and "
        "take more diverse prompts",
        examples=excerpts(run.texts(last=True)),
    )


def _flat(run: RecordedRun) -> RuleResult | None:
    signal = [row["groups/signal"] for row in run.rollouts if "groups/signal" in row]
    if len(signal) * run.prompts < FEWEST_GROUPS or any(not share <= 0 for share in signal):
        return None
    # With one prompt per rollout, rewards are equal within a rollout and differ between rollouts.
    means = [row["reward"] for row in run.rollouts if math.isfinite(row["reward"])]
    spread = max(mean(run.rollouts, "reward_std"), pstdev(means) if means else 0.0)
    if spread == 0:
        return None
    return RuleResult(
        f"in no group of {counted(len(signal), 'rollout')} did the completions' rewards differ, "
        f"although they differ between prompts (deviation {spread:.3g})",
        "make the reward depend on the completion, not only on the prompt or its columns",
        examples=excerpts(run.texts(last=True)),
    )  # fmt: skip


def _greedy(run: RecordedRun) -> RuleResult | None:
    entropy, temperature = mean(run.start, "entropy"), float(run.option("temperature", 1.0))
    if not entropy < ALIKE or not temperature < COLD:
        return None
    return RuleResult(
        f"at temperature {temperature:g} the entropy was {entropy:.2g} nats per token from the "
        f"first rollouts on: completions of a prompt are alike, and "
        f"{percent(mean(run.start, 'groups/signal'))} of groups had signal",
        "sample at temperature 1",
        {"temperature": 1.0},
        excerpts(run.texts(last=False)),
    )


def _solved(run: RecordedRun) -> RuleResult | None:
    before, after = run.change("reward").before, mean(run.end, "reward")
    rows = run.rollouts
    binary = all(0 <= row["reward"] <= 1 for row in rows) and mean(rows, "reward_std") <= 0.5
    always = all(row["reward"] == 1.0 for row in rows)  # finding `rewards_equal` covers this
    if not binary or not before >= SOLVED or not after >= SOLVED or always:
        return None
    if run.completions_of(run.start) < FEWEST_SOLVED:
        return None
    return RuleResult(
        f"the mean reward was {before:.3f} in the first rollouts already, and "
        f"{percent(mean(run.start, 'groups/signal'))} of groups had signal",
        "take prompts that the model solves in a fifth to four fifths of its attempts",
        examples=excerpts(run.texts(last=False)),
    )


def _partly_missing(run: RecordedRun) -> RuleResult | None:
    rows = run.end
    if math.isnan(mean(rows, "reward")):
        return None
    # Unscored completions may disappear although the task is not learned: the start counts too.
    sides = [part for part in (run.recorded(last=False), run.completions) if len(part) >= FEWEST]
    for name in functions(rows):
        never = math.isnan(mean(run.rollouts, f"rewards/{name}/mean"))
        failed = mean(rows, f"rewards/{name}/failed")
        if failed > MANY_MISSING:
            return RuleResult(
                f"{percent(failed)} of the calls of {name} failed or were too late",
                "read the warning that names its error and mend it, or give it more time",
                {"reward_timeout": 2 * float(run.option("reward_timeout", 300.0))},
            )
        if never and len(functions(rows)) > 1:
            return RuleResult(
                f"{name} never returned a number: what is trained is the other rewards",
                f"call {name} on two recorded completions by hand and print what it returns",
                examples=excerpts(run.texts(last=True)),
            )
        for part in sides if len(functions(rows)) == 1 else ():
            missed = [r for r in part if (r.get("scores") or {}).get(name) is None]
            if len(missed) > MANY_MISSING * len(part):
                return RuleResult(
                    f"{name} scored {percent(1 - len(missed) / len(part))} of {len(part)} recorded "
                    f"completions, the first of step {part[0]['step']}",
                    "find out from an unscored completion why; a failure to answer is a reward of "
                    "0, not None",
                    examples=excerpts([text_of_content(row["completion"]) for row in missed]),
                )
    return None


def _little(run: RecordedRun) -> RuleResult | None:
    rows, size = run.rollouts, int(run.option("num_generations", 2))
    signal, reward = mean(rows, "groups/signal"), mean(rows, "reward")
    low = band("groups/signal").bounds()[0]
    # With few groups, a share this low may be chance.
    chance = Z * math.sqrt(low * (1 - low) / max(1, len(rows) * run.prompts))
    if not 0 < signal < low - chance or run.gained:
        return None
    evidence = f"{percent(signal)} of groups had signal, with {counted(size, 'completion')} each"
    evidence += f", at a mean reward of {reward:.3g}"
    if size < 8:
        return RuleResult(
            evidence,
            f"sample more completions of each prompt: {4 * size} find four times as many "
            f"differences where they are rare{COLD_START}",
            {"num_generations": 4 * size},
        )
    return RuleResult(
        evidence,
        f"replace groups without signal by those of further prompts{COLD_START}",
        {"dynamic_sample": True},
    )


def _nothing_trained(run: RecordedRun) -> RuleResult | None:
    rows = [row for row in run.rows if "update/changed_share" in row]
    if run.dry or not rows or any(row["update/changed_share"] > 0 for row in rows):
        return None
    number = len(rows)
    steps = f"no weight changed in any of {number} steps" if number > 1 else "no weight changed"
    # With a KL penalty every step has a gradient, even without a signal from rewards.
    if all(row.get("update/no_signal") for row in rows) or mean(run.rollouts, "groups/signal") == 0:
        return RuleResult(
            f"{steps}: none had a completion with signal",
            "mend the rewards first; nothing else can help",
        )
    if any(row.get("update/nonfinite") for row in rows):
        options: dict[str, Any] = {}
        scale, of = largest_reward(run), sum(bool(r.get("update/nonfinite")) for r in rows)
        if scale > HUGE_REWARD:
            change, options = f"clip rewards: they reach {scale:.2g}", dict(CLIPPED_REWARD)
        elif run.option("fp16"):
            change, options = "compute in bfloat16", {"bf16": True, "fp16": False}
        else:
            change = "look for weights or rewards that are not finite"
        return RuleResult(f"{steps}: {of} gradients were not finite", change, options)
    rate = highest_rate(rows)
    if rate == 0:
        return RuleResult(
            f"{steps}: the learning rate was 0 in all of them",
            "set a learning rate, and fewer warm-up steps than steps",
            {"learning_rate": SMALL_RATE, "warmup_steps": 0},
        )
    if max(row.get("grad_norm", math.nan) for row in rows) == 0:
        return _no_gradient(run, steps)
    if rate >= NOT_ROUNDED:
        return RuleResult(
            f"{steps}, at a learning rate of {rate:g} and a gradient that is not 0",
            "find out what the optimizer is given: parameters that are frozen, or a schedule of 0",
        )
    raised = max(100 * rate, SMALL_RATE)
    return RuleResult(
        f"{steps}: at a learning rate of {rate:g} every step is lost in rounding",
        f"raise the learning rate to {raised:.3g}",
        {"learning_rate": raised},
    )


def _no_gradient(run: RecordedRun, steps: str) -> RuleResult:
    signal = percent(mean(run.rollouts, "groups/signal"))
    steps = f"{steps}: the gradient was 0, although {signal} of groups had signal"
    limit = int(run.option("max_completion_length", 512))
    if run.option("mask_truncated_completions") and many_cut(run):
        cut = percent(mean(run.rollouts, "completions/clipped_ratio"))
        return RuleResult(
            f"{steps}; {cut} of completions reach {limit} tokens, and such do not count "
            "(mask_truncated_completions)",
            *longer_by(run, limit),
        )
    return RuleResult(
        steps,
        "find out where it is lost: weights that are frozen or that the loss does not reach, "
        "rewards or advantages that are clipped or weighted to 0",
    )


RULES = (
    Rule(
        "rewards_missing",
        "No completion gets a reward",
        "`reward` is missing for all completions in the last rollouts. `rewards/<function>/nan` "
        "and `rewards/<function>/failed` distinguish NaN, failed calls and None",
        "Completions without a reward are left out, so nothing is learned.",
        "call the reward function by hand on two recorded completions",
        _missing,
        voids=True,
    ),
    Rule(
        "rewards_zero",
        "Every reward is 0",
        "`reward` and `reward_std` are 0 in all rollouts",
        "Advantages are differences of rewards within a group: all of them are 0.",
        "score a right completion by hand; use easier prompts, or a reward with partial credit",
        lambda run: _equal(run, zero=True),
        voids=True,
    ),
    Rule(
        "rewards_equal",
        "All rewards are equal",
        "`reward_std` is 0 and `reward` is the same in all rollouts",
        "Advantages are differences of rewards within a group: all of them are 0.",
        "a reward that distinguishes completions, or harder prompts",
        lambda run: _equal(run, zero=False),
        voids=True,
    ),
    Rule(
        "rewards_alike",
        "All rewards are nearly equal",
        "`reward_std` is below 0.2 % of `reward` in all rollouts, and the reward does not change "
        "beyond chance",
        "The policy learns the last digits of the rewards, which are noise.",
        "a reward that distinguishes completions, a higher `temperature`, or more diverse prompts",
        _alike,
        voids=True,
    ),
    Rule(
        "greedy_sampling",
        "Sampling is nearly greedy",
        "`entropy` is below 0.1 nats from the first rollouts on, and `temperature` is below 0.5",
        "Nothing new is tried, and gradients are those of logits divided by the temperature.",
        "`temperature 1`",
        _greedy,
    ),
    Rule(
        "groups_flat",
        "No group has different rewards",
        "`groups/signal` is 0 in all rollouts, although `reward_std` is above 0 or `reward` "
        "differs between rollouts",
        "Only differences between completions of one prompt are learned from.",
        "a reward that depends on the completion",
        _flat,
        voids=True,
    ),
    Rule(
        "nothing_trained",
        "No weight was trained",
        "`update/changed_share` is 0 in all steps. The evidence shows the reason: "
        "`update/no_signal`, `groups/signal`, `update/nonfinite`, `learning_rate` or `grad_norm`",
        "The model that was saved is the one that was loaded.",
        "the learning rate; if no step had signal, the rewards",
        _nothing_trained,
        voids=True,
    ),
    Rule(
        "already_solved",
        "The model solved the prompts before training",
        "`reward`, if it is between 0 and 1, is at least 0.95 in the first rollouts",
        "If nearly all completions are right, hardly any group has signal.",
        "harder prompts",
        _solved,
    ),
    Rule(
        "partly_missing",
        "A reward is missing for many completions",
        "calls of a reward function fail (`rewards/<function>/failed`), one of several functions "
        "never returns a number, or recorded completions have no score",
        "A completion without a score is left out of its group, even a good one.",
        "the function's error, or a reward of 0 for a completion that cannot be judged",
        _partly_missing,
    ),
    Rule(
        "little_signal",
        "Few groups have signal",
        "`groups/signal` is below its healthy range, beyond chance, and the reward does not rise",
        "Time is spent on groups from which nothing is learned, and the few others are noise.",
        "more completions per prompt (K), `dynamic_sample`, or `prompt_sampling variance` by a "
        "column that tells the difficulty",
        _little,
    ),
)
