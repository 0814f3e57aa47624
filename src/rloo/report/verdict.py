"""The verdict on a run in words: what changed, and whether chance explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rloo.report.console import counted, duration, percent, plus_minus
from rloo.report.metrics import Z

# With fewer steps on either side the standard error itself is too uncertain.
FEWEST_STEPS = 3


def verdict(summary: Mapping[str, Any]) -> str:
    """What the run achieved, one sentence per line: of pass@1 before and after if both were
    measured, otherwise of the training reward in the first and last steps. `summary` is the content
    of summary.json; see `Monitor.finish`."""
    start, end = summary.get("start") or {}, summary.get("end") or {}
    measured = "pass@1_interval" in start and "pass@1_interval" in end
    lines = [_accuracy(summary, start, end) if measured else _training_reward(summary)]
    if summary.get("status") == "interrupted":
        lines.insert(0, f"Stopped after {summary['steps']} of {summary['max_steps']} steps.")
    lines += [_drift(summary.get("training")), _incidents(summary)]
    return "\n".join(line for line in lines if line)


def direction(
    before: float, before_bounds: Sequence[float], after: float, after_bounds: Sequence[float]
) -> int:
    """1 if `after` is larger than `before` beyond chance, -1 if it is smaller, else 0: by the 95 %
    interval of the difference, computed from the two intervals (Newcombe 1998, method 10). It takes
    them as independent, which is conservative for measurements on the same problems."""
    difference = after - before
    (before_low, before_high), (after_low, after_high) = before_bounds, after_bounds
    if difference - math.hypot(after - after_low, before_high - before) > 0:
        return 1
    if difference + math.hypot(after_high - after, before - before_low) < 0:
        return -1
    return 0


def _accuracy(summary: Mapping[str, Any], start: Mapping[str, Any], end: Mapping[str, Any]) -> str:
    before, after = start["pass@1"], end["pass@1"]
    moved = direction(before, start["pass@1_interval"], after, end["pass@1_interval"])
    words = _sentence("pass@1", moved, _shown(start, "pass@1"), _shown(end, "pass@1"))
    if "num_prompts" in end:
        words += f" on {end['num_prompts']:,} evaluation problems"
    words += f" in {duration(summary['wall_seconds'])}"
    if "pass@1_greedy" in start and "pass@1_greedy" in end:
        greedy = f"{_shown(start, 'pass@1_greedy')} to {_shown(end, 'pass@1_greedy')}"
        words += f"; greedy pass@1 went from {greedy}"
    return words + _chance(moved)


def _shown(metrics: Mapping[str, Any], name: str) -> str:
    return percent(metrics[name], metrics.get(f"{name}_interval"))


def _training_reward(summary: Mapping[str, Any]) -> str:
    training = summary.get("training")
    if training is None:
        return "There were too few steps to compare anything."
    sides = [training[side]["reward"] for side in ("start", "end")]
    (before, before_error), (after, after_error) = sides
    num_steps = training["num_steps"]
    if not (math.isfinite(before) and math.isfinite(after)):
        return "The training reward cannot be compared: not enough completions were scored."
    change = f"The training reward went from {before:.3f} to {after:.3f}"
    if not (math.isfinite(before_error) and math.isfinite(after_error)):
        return f"{change}; its standard error is unknown, so this may be chance."
    if num_steps < FEWEST_STEPS:
        return f"{change}; with so few steps this may be chance."
    bounds = [(mean - Z * error, mean + Z * error) for mean, error in sides]
    moved = direction(before, bounds[0], after, bounds[1])
    words = _sentence("The training reward", moved, *(plus_minus(*side) for side in sides))
    words += f" (first and last {num_steps} steps) in {duration(summary['wall_seconds'])}"
    return f"{words}{_chance(moved)} There was no evaluation before and after training."


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
        before, after = (training[side].get(name, math.nan) for side in ("start", "end"))
        if math.isfinite(before) and math.isfinite(after):
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
