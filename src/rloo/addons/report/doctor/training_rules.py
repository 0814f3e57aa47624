"""Rules on steps that are too large, too small or too noisy, and on a policy far from its start."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, pvariance
from typing import Any

from rloo.addons.report.doctor.run_record import (
    CLIPPED_REWARD,
    COLD_START,
    HUGE_REWARD,
    SMALL_RATE,
    RecordedRun,
    Rule,
    RuleResult,
    band,
    excerpts,
    highest_rate,
    largest_reward,
    mean,
)
from rloo.distributed.standard_streams import counted
from rloo.tracking.console import percent

# KL (nats per token) that one rollout may add.
KL_JUMP = 0.5
# Largest KL of a policy that has not moved; such a policy's entropy varies only with the prompts.
KL_MOVED = 0.1
# A leap of more nats destroys the policy; a tenth of the learning rate is then still too high.
DESTROYED = 2.0
# The policy is also destroyed if less than this share of the reward is left.
LOST = 0.25
# Share of later rollouts that must stay beyond all earlier rollouts.
LASTING = 0.8
# Lowest published learning rate, and the number of steps below which its effect may be invisible.
USUAL, FEW_STEPS = 5e-7, 100
# KL of a policy that has moved enough to learn, and the largest factor on a learning rate.
KL_LEARNING, MOST_RAISED = 1e-2, 1000.0
# Fewest completions before K is blamed for no learning: for strong and for weaker evidence.
FEWEST_COMPLETIONS, MANY_COMPLETIONS = 96, 256
# Share of noise in the baselines' variance that is strong evidence.
NOTHING_ELSE = 0.9
# Smallest share of the entropy that remains after one rollout. The limit does not apply to an
# entropy below ENTROPY_LEFT nats.
ENTROPY_KEPT, ENTROPY_LEFT = 0.25, 0.05
# Largest rise of the entropy (nats) and largest growth of completions (factor) in one rollout.
ENTROPY_RISE, GROWN = 1.0, 3.0
# Limits below which a policy has not moved: KL in nats per token, relative change of the entropy,
# relative change of the held-out length (the same noise samples all evaluations).
KL_STILL, ENTROPY_STILL, LENGTH_STILL = 1e-4, 0.05, 0.03
# Relative change of length below which nearly all completions are the same.
LENGTH_SAME = 0.01
# Scores that stay equal while held-out completions stay the same.
SCORES = ("reward", "reward_std", "pass@1", "pass@1_greedy", "groups/signal")
# KL per token from which on the steps of a policy are large enough to learn.
KL_TRIED = 1e-3
# With beta above this many standard deviations of the reward, no gain is visible.
HELD_BACK = 10.0
# Allowed mismatch of sampler and trainer: as a share of the entropy; with 16 bits, in nats.
OF_ENTROPY, PRECISION = 0.1, 0.02
# Fewest rollouts from which a rule reports that a run does not learn.
ENOUGH = 9
FEW_GENERATIONS = 4


def _rate_high(run: RecordedRun) -> RuleResult | None:
    reward, seen = run.change("reward"), list(_leaps(run))
    if not seen or run.gained or mean(run.rows, "update/changed_share") == 0:
        return None
    rate = highest_rate(run.rows)
    lost = reward.moved == -1 and reward.after < LOST * reward.before
    less = 100 if lost or max(nats for nats, _ in seen) > DESTROYED else 10
    return RuleResult(
        f"from one rollout to the next {' and '.join(words for _, words in seen)}, at a learning "
        f"rate of {rate:.2g}; the reward went from {reward.words}",
        f"divide the learning rate by {less}",
        {"learning_rate": rate / less},
        excerpts(run.texts(last=True)),
    )


def _leaps(run: RecordedRun) -> Iterator[tuple[float, str]]:
    """Changes between rollouts that small steps do not cause, as (nats, or 0 for lengths; words).
    Rollouts of few prompts differ as much, so a leap must last, and a known KL must confirm it."""
    names = ("kl", "entropy", "completions/mean_length")
    kl, entropy, length = ([r.get(name, math.nan) for r in run.rollouts] for name in names)
    if at := leap(kl, 1, lambda old, new: new > old + KL_JUMP):
        rose = kl[at] - kl[at - 1]
        yield rose, f"the KL to the reference rose by {rose:.2g} nats per token"
    if max(filter(math.isfinite, kl), default=math.inf) < KL_MOVED:
        return
    before = 1 if run.prompts > 1 else 3
    if at := leap(entropy, before, _other_entropy):
        way = "rose" if entropy[at] > entropy[at - 1] else "fell"
        change = abs(entropy[at] - entropy[at - 1])
        yield (
            change,
            f"the entropy {way} from {entropy[at - 1]:.2g} to {entropy[at]:.2g} nats for good",
        )
    at, reward = leap(length, before, lambda old, new: new > GROWN * old > 0), run.change("reward")
    if at and (reward.moved == -1 or 0 <= 2 * reward.after < reward.before):
        yield 0.0, f"completions grew {length[at] / length[at - 1]:.1f} times as long"


def _other_entropy(old: float, new: float) -> bool:
    return new > old + ENTROPY_RISE or new < ENTROPY_KEPT * old > ENTROPY_KEPT * ENTROPY_LEFT


def leap(
    values: Sequence[float], before: int, beyond: Callable[[float, float], bool]
) -> int | None:
    """The first index whose value and nearly all later values are `beyond` every earlier value."""
    for at in range(before, len(values) - 1):
        old, after = values[:at], values[at:]
        out = [all(beyond(one, new) for one in old) for new in after]
        if out[0] and fmean(out) >= LASTING:
            return at
    return None


def _collapse(run: RecordedRun) -> RuleResult | None:
    entropy = run.change("entropy")
    if not entropy.after < band("entropy").bounds(entropy.before)[0] or run.gained:
        return None
    return RuleResult(
        f"the entropy went from {entropy.words} nats per token, and the reward from "
        f"{run.change('reward').words}",
        "divide the learning rate by 10 and go on from the last checkpoint before it fell",
        {"learning_rate": float(run.option("learning_rate", SMALL_RATE)) / 10},
        excerpts(run.texts(last=True)),
    )


def _kl_explosion(run: RecordedRun) -> RuleResult | None:
    kl, beta = run.change("kl"), float(run.option("beta", 0.0))
    if not kl.after > band("kl").bounds()[1]:
        return None
    return RuleResult(
        f"the KL to the reference went from {kl.words} nats per token, with beta {beta:g}; the "
        f"reward from {run.change('reward').words}",
        "raise beta tenfold, so that distance costs more than it earns",
        {"beta": 10 * beta or 0.05},
        excerpts(run.texts(last=True)),
    )


def _rate_low(run: RecordedRun) -> RuleResult | None:
    rows, reward = run.rollouts, run.change("reward")
    if run.dry or len(rows) < ENOUGH or mean(rows, "groups/signal") < 0.1:
        return None
    changed = mean([r for r in run.rows if not r.get("update/no_signal")], "update/changed_share")
    still, rounded = _stands_still(run), not band("update/changed_share").holds(changed)
    if not still and rounded:
        still = "most steps are lost in rounding"
    # The reward may move by chance, so an active run is judged later.
    if not changed > 0 or not still or (not run.over and reward.moved != 0):
        return None
    rate = highest_rate(run.rows)
    steps = max(len(run.rows), int(run.rows[-1].get("step", 0)))
    if not rounded and rate >= USUAL and steps < FEW_STEPS:
        return None
    # The KL grows with the square of the rate, as long as both are small.
    kl = mean(run.end, "kl")
    factor = math.sqrt(KL_LEARNING / kl) if kl > 0 else 10.0
    factor = float(f"{min(MOST_RAISED, max(10.0, factor)):.1g}")
    raised = max(factor * rate, SMALL_RATE * (10 if run.option("use_peft") else 1))
    return RuleResult(
        f"after {counted(steps, 'step')} at a learning rate of up to {rate:.2g} {still}; a step "
        f"changes {percent(changed)} of the weights; the reward went from {reward.words}",
        f"raise the learning rate to {raised:.3g}",
        {"learning_rate": float(f"{raised:.3g}")},
    )


def _stands_still(run: RecordedRun, kl_still: float = KL_STILL) -> str:
    """A description of how little the policy has moved; "" if it has moved or this is unknown."""
    kl, entropy = mean(run.end, "kl"), run.change("entropy")
    if math.isfinite(kl):
        return f"the KL is {kl:.1g} nats per token" if abs(kl) < kl_still else ""
    if run.measured is not None and (same := _said_the_same(*run.measured)):
        return same
    change = abs(entropy.after / entropy.before - 1) if entropy.before else math.nan
    if not change < ENTROPY_STILL or run.change("reward").moved != 0:
        return ""
    if run.measured is None:
        return f"the entropy changed by {percent(change)}"
    before, after = (row.get("completions/mean_length", math.nan) for row in run.measured)
    if not abs(after - before) < LENGTH_STILL * before or run.gained:
        return ""
    return f"held-out completions, whose noise is the same, went from {before:.3g} to " + (
        f"{after:.3g} tokens"
    )


def _said_the_same(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    """A description of held-out completions with equal scores and nearly equal length, or "". The
    rewards must vary. Training rewards and entropies are weaker evidence: their prompts change."""
    before, after = (row.get("completions/mean_length", math.nan) for row in (start, end))
    if not start.get("reward_std") or any(start.get(name) != end.get(name) for name in SCORES):
        return ""
    if not abs(after - before) < LENGTH_SAME * before:
        return ""
    return (
        "held-out completions, whose noise is the same, have the same scores, and went from "
        f"{before:.4g} to {after:.4g} tokens"
    )


def _beta_high(run: RecordedRun) -> RuleResult | None:
    rows, beta = run.rollouts, float(run.option("beta", 0.0))
    spread = mean(rows, "reward_std")
    if len(rows) < ENOUGH or run.change("reward").moved != 0 or run.gained:
        return None
    if not beta > HELD_BACK * spread > 0:
        return None
    # The best policy under the penalty gains about Var(reward) / beta, if that is small.
    gain = spread**2 / beta
    return RuleResult(
        f"with beta {beta:g} and rewards that deviate by {spread:.3g} the best policy under the "
        f"penalty gains about {gain:.2g} in reward; it went from {run.change('reward').words}",
        "set beta to a tenth of the rewards' deviation",
        {"beta": float(f"{spread / 10:.1g}")},
    )


def _few_generations(run: RecordedRun) -> RuleResult | None:
    rows, size = run.rollouts, int(run.option("num_generations", 0))
    if not 2 <= size <= FEW_GENERATIONS or len(rows) < ENOUGH or run.gained:
        return None
    steps = max(len(rows), int(rows[-1].get("step", 0)))
    number = steps * run.prompts * size // (1 if run.over else 4)
    if run.change("reward").moved != 0 or number < FEWEST_COMPLETIONS:
        return None
    if _stands_still(run, KL_TRIED):  # a larger K does not help if the steps are few or small
        return None
    signal, noise = mean(rows, "groups/signal"), noise_of_baselines(run, size)
    seen, enough = [], number >= MANY_COMPLETIONS
    if noise > (0.5 if enough else NOTHING_ELSE):
        seen.append(f"{percent(noise)} of the baselines' variance is sampling noise")
    if signal < 0.5 and enough:
        seen.append(f"{percent(signal)} of groups have signal")
    if not seen:
        return None
    return RuleResult(
        f"with {size} completions of a prompt {' and '.join(seen)}, and in {len(rows)} rollouts "
        f"the reward went from {run.change('reward').words}, no more than by chance",
        f"sample {4 * size} completions of each prompt{COLD_START if signal < 0.1 else ''}",
        {"num_generations": 4 * size},
    )


def noise_of_baselines(run: RecordedRun, size: int) -> float:
    """The share of the baselines' variance that is sampling noise. The variance of rewards is
    between + within, and the variance of baselines is between + within / (K - 1). With one prompt
    per rollout, `between` comes from the means of rollouts, whose variance is between + within /
    K."""
    rows = run.rollouts
    spread, baselines = mean(rows, "reward_std") ** 2, mean(rows, "baseline/variance")
    if run.prompts == 1:
        within = fmean(
            [r["reward_std"] ** 2 for r in rows if math.isfinite(r.get("reward_std", math.nan))]
            or [math.nan]
        )
        means = [row["reward"] for row in rows if math.isfinite(row["reward"])]
        between = max(0.0, pvariance(means) - within / size) if len(means) > 1 else math.nan
        baselines = between + within / (size - 1)
    elif size > 2:
        within = (spread - baselines) * (size - 1) / (size - 2)
    else:
        within = spread * mean(rows, "groups/signal")
    return min(1.0, within / (size - 1) / baselines) if baselines > 0 else math.nan


def _mismatch(run: RecordedRun) -> RuleResult | None:
    rows = [row for row in run.rollouts if row.get("staleness/max", 0.0) == 0.0]
    found = mean(rows, "mismatch/mean")
    limit = band("mismatch/mean").bounds()[1]
    entropy = mean(run.start, "entropy")
    if entropy * OF_ENTROPY < limit:  # a low entropy leaves less room for a difference
        limit = max(PRECISION, entropy * OF_ENTROPY)
    if not found > limit:
        return None
    dtype = run.option("rollout_dtype")
    rounded = dtype not in (None, "auto", "float32")
    return RuleResult(
        f"sampler and trainer give a token log-probs that are {found:.2g} nats apart in the mean "
        f"(at most {max(row.get('mismatch/max', 0.0) for row in rows):.2g}); precision of "
        f"sampling: {dtype or 'that of training'}",
        "sample in float32; if that does not help the engine has other weights"
        if rounded
        else "find out what the engine samples with: weights of another step, or another "
        "temperature than is asked for",
        {"rollout_dtype": "float32"} if rounded else {},
    )


def _refused(run: RecordedRun) -> RuleResult | None:
    refused = [row for row in run.rows if row.get("update/nonfinite")]
    if not refused or len(refused) < 0.02 * len(run.rows):
        return None
    scale, rate = largest_reward(run), float(run.option("learning_rate", SMALL_RATE)) / 10
    options: dict[str, Any] = {"learning_rate": rate}
    change = "divide the learning rate by 10"
    if scale > HUGE_REWARD:
        change, options = f"clip rewards: they reach {scale:.2g}", dict(CLIPPED_REWARD)
    elif run.option("fp16"):
        change, options = "compute in bfloat16", {"bf16": True, "fp16": False}
    return RuleResult(
        f"in {len(refused)} of {counted(len(run.rows), 'step')} the gradient was not finite, first "
        f"in step {refused[0].get('step', 0):.0f}: those were refused",
        change,
        options,
    )


RULES = (
    Rule(
        "learning_rate_high",
        "The learning rate is too high",
        "a jump from one rollout to the next, which lasts in four of five later rollouts, without "
        "a gain in reward. Jumps are: `kl` rises by more than 0.5 nats per token, `entropy` falls "
        "by three quarters or rises by one nat, or completions become three times as long. If `kl` "
        "is known, it must reach 0.1",
        "Steps leave the region in which the gradient says anything; the policy is destroyed.",
        "a tenth of the learning rate; a hundredth if the jump is above 2 nats",
        _rate_high,
        voids=True,
    ),
    Rule(
        "kl_explosion",
        "The policy has left its reference",
        "`kl` is above its healthy range at the end",
        "The text is no longer one that the base model would write; rewards judge it wrongly.",
        "ten times `beta`",
        _kl_explosion,
        voids=True,
    ),
    Rule(
        "collapse",
        "The policy has collapsed",
        "`entropy` is below its healthy range at the end, without a gain in reward",
        "A policy that always says the same cannot find anything better.",
        "a tenth of the learning rate",
        _collapse,
        voids=True,
    ),
    Rule(
        "mismatch",
        "The sampler is not the policy that is trained",
        "`mismatch/mean` is above its healthy range. With a low `entropy` at the start, the limit "
        "is a tenth of this entropy, but at least 0.02. Only rollouts of current weights count "
        "(`staleness/max` 0)",
        "The gradient is that of another distribution; small differences multiply over a "
        "completion.",
        "`rollout_dtype float32`",
        _mismatch,
    ),
    Rule(
        "steps_refused",
        "Gradients are not finite",
        "`update/nonfinite` is set in at least 2 % of steps",
        "Refused steps teach nothing, and weights are near to diverging.",
        "clipped rewards, bfloat16 in place of fp16, or a tenth of the learning rate",
        _refused,
    ),
    Rule(
        "beta_high",
        "The KL penalty holds the policy where it is",
        "`beta` is above ten times `reward_std`, and the reward does not change beyond chance in "
        "at least 9 rollouts",
        "Under the penalty the best policy gains about Var(reward) / beta in reward.",
        "`beta` set to a tenth of the rewards' standard deviation",
        _beta_high,
    ),
    Rule(
        "learning_rate_low",
        "The learning rate is too low",
        "`update/changed_share` is below its healthy range. Or `kl` is below 1e-4 after at least 9 "
        "rollouts; if the learning rate is at least 5e-7, 100 steps are needed too. Without a "
        "reference, three conditions replace `kl`: `entropy` changes by less than 5 %, the reward "
        "does not change beyond chance, and the length of held-out completions, if they exist, "
        "changes by less than 3 %",
        "The policy is still where it began.",
        "a learning rate with which the KL would be near 0.01",
        _rate_low,
    ),
    Rule(
        "few_generations",
        "K is too small for the variance of the rewards",
        "K is at most 4, and the reward does not change beyond chance in at least 9 rollouts and "
        "96 completions. In addition, more than 90 % of `baseline/variance` is sampling noise. "
        "From 256 completions on, 50 % is enough, or `groups/signal` below 50 %. While a run is "
        "active, four times as many completions are needed",
        "The baseline of a completion is the mean of the others: with few of them it is noise.",
        "four times `num_generations`",
        _few_generations,
    ),
)
