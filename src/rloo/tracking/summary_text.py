"""The verdict on a run in words: the change, its significance, and whether the change counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rloo.distributed.standard_streams import counted
from rloo.tracking.before_after import BeforeAfter, change_between, change_of, mean_reward, windows
from rloo.tracking.console import duration, percent, plus_minus
from rloo.tracking.metrics import window_mean

REWARD = ("reward", "reward/standard_error")
DRIFTS = ("kl", "entropy", "completions/mean_length", "groups/signal")
# A summary's `reward_kind` if the first reward is not only 0 and 1 (see `rloo.trainer.evaluate`).
GRADED = "graded"


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return the result of the run, one sentence per line. The result compares the evaluations
    before and after training if there are both, otherwise the training reward in the first and last
    rollouts. If a finding voids the run, it comes before the figures, and the text does not judge
    the figures. `summary` is the content of summary.json; see `Monitor.finish`."""
    start, end = summary.get("start") or {}, summary.get("end") or {}
    void = next((f for f in summary.get("findings") or () if f["voids"]), None)
    figures = _held_out(summary, start, end) if start and end else _training_reward(summary)
    lines = [_status(summary)]
    if void is not None:
        lines.append(f"{void['title']}: {void['evidence']}.")
        figures = f"So this is no progress: {_unjudged(summary, start, end)}."
    elif fell := _judge_that_fell(summary, start, end):
        lines.append(fell)
        figures = f"So this is no progress: {_unjudged(summary, start, end)}."
    lines += [figures, _by_reward(summary, start, end)]
    lines += [_drift(summary.get("training")), _incidents(summary)]
    return "\n".join(line for line in lines if line)


def training_of(rollouts: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Compare the first and the last rollouts: the mean reward with its error, the direction in
    which each single reward changed, and metrics that drift. None for fewer than two rollouts."""
    if len(rollouts) < 2:
        return None
    first, last = (
        {"reward": list(mean_reward(rows))}
        | {name: mean for name, mean in window_mean(rows).items() if name in DRIFTS}
        for rows in windows(rollouts)
    )
    names = dict.fromkeys(n for row in rollouts for n in row if is_of_function(n))
    changes = {name: change_of(rollouts, name) for name in names}
    by_reward = {n: [c.before, c.after, c.moved] for n, c in changes.items()}
    size = len(windows(rollouts)[0])
    return {"num_steps": size, "start": first, "end": last, "by_reward": by_reward}


def is_of_function(name: str) -> bool:
    """Return whether a metric is the mean of one reward function."""
    return name.startswith("rewards/") and name.endswith("/mean")


def headline(start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    """Return the metric that best describes a model's quality: pass@1 for rewards that are 0 or 1,
    otherwise the mean reward."""
    graded = GRADED in (start.get("reward_kind"), end.get("reward_kind"))
    both = "pass@1_interval" in start and "pass@1_interval" in end
    return "pass@1" if both and not graded else "reward"


def _judge_that_fell(
    summary: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]
) -> str:
    """A sentence if an evaluation-only reward fell, else an empty string. If such a reward fell,
    the run is no success, even if training rewards rose. Evaluation-only rewards are those without
    a training metric."""
    trained = (summary.get("training") or {}).get("by_reward") or ()
    for name in end if trained else ():
        if is_of_function(name) and name not in trained:
            change = change_between(start, end, name)
            if change.moved == -1:
                function = name.removeprefix("rewards/").removesuffix("/mean")
                return f"{function}, which only judges, fell from {change.words}."
    return ""


def _status(summary: Mapping[str, Any]) -> str:
    words = {"interrupted": "Stopped", "died": "Died"}.get(summary.get("status", ""))
    steps = f"{summary['steps']} of {counted(summary['max_steps'], 'step')}"
    return f"{words} after {steps}." if words else ""


def _held_out(summary: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    name = headline(start, end)
    moved = change_between(start, end, name).moved
    what = "pass@1" if name == "pass@1" else "The held-out reward"
    if moved is None:
        return _training_reward(summary)
    words = _sentence(what, moved, _shown(start, name), _shown(end, name)) + _where(summary, end)
    if name == "pass@1" and "pass@1_greedy" in start and "pass@1_greedy" in end:
        greedy = f"{_shown(start, 'pass@1_greedy')} to {_shown(end, 'pass@1_greedy')}"
        words += f"; greedy pass@1 went from {greedy}"
    return words + _chance(moved)


def _where(summary: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    number = end.get("num_prompts")
    problems = "" if number is None else f" on {counted(int(number), 'evaluation problem')}"
    return f"{problems} in {duration(summary['wall_seconds'])}"


def _shown(metrics: Mapping[str, Any], name: str) -> str:
    bounds = metrics.get(f"{name}_interval")
    if name.startswith("pass@"):
        return percent(metrics[name], bounds)
    if bounds is None:
        return plus_minus(metrics[name], metrics.get("reward/standard_error") or math.nan)
    return f"{metrics[name]:.3f} [{bounds[0]:.3f}, {bounds[1]:.3f}]"


def _unjudged(summary: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    """The figures of a run whose improvement does not count."""
    if start and end:
        name = headline(start, end)
        if None not in (start.get(name), end.get(name)):
            what = "pass@1" if name == "pass@1" else "the held-out reward"
            return f"{what} was {_shown(start, name)} before and {_shown(end, name)} after"
    training = summary.get("training")
    values = [training[side]["reward"][0] for side in ("start", "end")] if training else []
    if not values or not all(map(_is_number, values)):
        return f"{counted(summary['steps'], 'step', ('was', 'were'))} made"
    return f"the training reward was {values[0]:.3f} before and {values[1]:.3f} after"


def _training_reward(summary: Mapping[str, Any]) -> str:
    training = summary.get("training")
    if training is None:
        return "There were too few steps to compare anything."
    sides = [
        [math.nan if v is None else v for v in training[side]["reward"]]
        for side in ("start", "end")
    ]
    (before, before_error), (after, after_error) = sides
    if not (math.isfinite(before) and math.isfinite(after)):
        return "The training reward cannot be compared: not enough completions were scored."
    change = f"The training reward went from {before:.3f} to {after:.3f}"
    if not (math.isfinite(before_error) and math.isfinite(after_error)):
        return f"{change}; its standard error is unknown, so this may be chance."
    first, last = sides
    moved = BeforeAfter.of_errors(first, last, training["num_steps"]).moved
    if moved is None:
        return f"{change}; with so few steps this may be chance."
    words = _sentence("The training reward", moved, *(plus_minus(*side) for side in sides))
    words += f" ({_first_and_last(training['num_steps'])}) in "
    words += duration(summary["wall_seconds"])
    return f"{words}{_chance(moved)} There was no evaluation before and after training."


def _first_and_last(number: int) -> str:
    return "first and last rollout" if number == 1 else f"first and last {number} rollouts"


def _by_reward(summary: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    """Each reward separately, if there are several, including evaluation-only rewards, and win
    rates."""
    names = [name for name in end if is_of_function(name)] if start else []
    known = {
        name: (start[name], end[name], change_between(start, end, name).moved)
        for name in names
        if None not in (start.get(name), end.get(name))
    }
    if not known:
        known = dict((summary.get("training") or {}).get("by_reward") or {})
    parts = []
    for name, (before, after, moved) in known.items() if len(known) > 1 else ():
        if _is_number(before) and _is_number(after):
            how = "went" if not moved else "rose" if moved > 0 else "fell"
            chance = " (no more than chance)" if moved == 0 else ""
            function = name.removeprefix("rewards/").removesuffix("/mean")
            parts.append(f"{function} {how} from {before:.3g} to {after:.3g}{chance}")
    for name, value in end.items():
        if name.endswith("/win_rate") and value is not None:
            judge = name.removeprefix("rewards/").removesuffix("/win_rate")
            wins = percent(value, end.get(f"{name}_interval"))
            parts.append(f"by {judge} completions win {wins} of comparisons with the start")
    return f"By reward: {', '.join(parts)}." if parts else ""


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _sentence(what: str, moved: int, before: str, after: str) -> str:
    if moved == 0:
        return f"{what} shows no change beyond chance: {before} before, {after} after"
    return f"{what} {'rose' if moved > 0 else 'fell'} from {before} to {after}"


def _chance(moved: int) -> str:
    return ". The difference is larger than chance explains." if moved else "."


def _drift(training: Mapping[str, Any] | None) -> str:
    if training is None:
        return ""
    parts = []
    for name, words in (
        ("kl", "KL to the reference per token went from {:.3g} to {:.3g}"),
        ("completions/mean_length", "mean completion length from {:.3g} to {:.3g} tokens"),
        ("entropy", "entropy from {:.3g} to {:.3g}"),
    ):
        before, after = (training[side].get(name) for side in ("start", "end"))
        if _is_number(before) and _is_number(after):
            parts.append(words.format(before, after))
    text = ", ".join(parts)
    return f"In training, {text}." if text else ""


def _incidents(summary: Mapping[str, Any]) -> str:
    parts = []
    if refused := summary.get("refused_steps", 0):
        parts.append(f"{counted(refused, 'step')} refused because the gradient was not finite")
    if notes := summary.get("notes"):
        parts.append(f"{counted(len(notes), 'note')}, also in summary.json")
    return f"{'; '.join(parts)}." if parts else ""
