"""The progress of a run, as phrases for a line or for a live view on a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from rloo.tracking.before_after import WINDOW_ROLLOUTS, mean_reward, windows
from rloo.tracking.console import (
    FUNCTION_MEAN,
    LONGEST_LINE,
    Row,
    clock,
    counted,
    duration,
    plus_minus,
)


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """The progress after one step, as phrases by subject. A phrase is never broken. `progress` has
    the step, the seconds per step and the remaining time. `reward` is the mean reward, the number
    of its rollouts, and its change. `rows` are the other phrases, by name. `span` describes the
    steps over which their metrics are averaged; it is empty for one step."""

    step: int
    max_steps: int
    progress: list[str]
    reward: list[str]
    rows: dict[str, list[str]]
    span: str

    def line(self) -> str:
        """Return one line of less than 120 characters for a file or a pipe. Phrases that do not fit
        are left out, the least important first; metrics.jsonl has all values. The line also leaves
        out the time of day, the time of each phase, and the reward of the only reward function,
        which is the total reward."""
        speed, left = (self.progress[1:2], self.progress[2:3])
        memory = [phrase for phrase in self.rows["time"] if phrase.startswith("memory")]
        functions = [", ".join(self._functions())] if self._functions() else []
        rollout, policy, span = self.rows["rollout"], self.rows["policy"], [self.span]
        head = [self.progress[0], *speed, *left, *self.reward]
        sections = [head, functions, rollout, policy, memory, span if self.span else []]
        shown = {self.progress[0], *self.reward[:2]}
        by_importance = [left, self.reward[2:], rollout, policy, functions, speed, memory, span]
        for phrase in (phrase for some in by_importance for phrase in some):
            if len(_joined(sections, shown | {phrase})) <= LONGEST_LINE:
                shown.add(phrase)
        return _joined(sections, shown)

    def brief(self) -> list[str]:
        """Return the phrases that stay in the scroll-back of a terminal."""
        rows = [phrase for name in ("rollout", "policy") for phrase in self.rows[name]]
        span = [f"({self.span})"] if self.span else []
        return [self.progress[0], *self.reward[:2], *self._functions(), *rows, *span]

    def _functions(self) -> list[str]:
        return self.rows["rewards"] if len(self.rows["rewards"]) > 1 else []


def _joined(sections: Sequence[Sequence[str]], shown: Collection[str]) -> str:
    """The sections in one line, with the phrases in `shown`."""
    parts = ("  ".join(phrase for phrase in section if phrase in shown) for section in sections)
    return " | ".join(filter(None, parts))


def progress_line(
    step: int,
    max_steps: int,
    *,
    scored: Sequence[Row],
    recent: Sequence[Row],
    waiting: float | None = 1.0,
    memory: str = "",
) -> ProgressLine:
    """Return the progress after `step`. `scored` are all steps with rewards, in order; `recent` are
    the last steps, over which metrics are averaged. `waiting` is the time of the run, including
    evaluations and checkpoints, divided by the time of its steps; None for a run that has ended."""
    speed = _recent_mean(recent, "step_time")
    progress = [f"step {step}/{max_steps}"]
    if math.isfinite(speed):
        progress += [f"{speed:.2g} s a step" if speed < 10 else f"{duration(speed)} a step"]
        if waiting is not None and step < max_steps:
            left = speed * waiting * (max_steps - step)
            progress += [f"{duration(left)} left", f"until {clock(left)}"]
    window = scored[-WINDOW_ROLLOUTS:]
    reward = [f"reward {plus_minus(*mean_reward(window))}"]
    if len(scored) > 1:
        (first, first_error), (now, error) = map(mean_reward, windows(scored))
        change = plus_minus(now - first, math.hypot(error, first_error), signed=True)
        reward += [f"({counted(len(window), 'rollout')})", f"{change} since the start"]
    names = dict.fromkeys(n for row in recent for n in row if FUNCTION_MEAN.fullmatch(n))
    shares = {n: _recent_mean(recent, n) for n in dict.fromkeys(n for row in recent for n in row)}
    rows = {
        "rewards": [
            f"{' '.join(name[len('rewards/') : -len('/mean')].split())} {mean:.3g}"
            for name in names
            if math.isfinite(mean := shares[name])
        ],
        "rollout": _phrases(
            shares,
            ("signal {:.0f} %", "groups/signal", 100.0),
            ("clipped {:.0f} %", "completions/clipped_ratio", 100.0),
            ("length {:.3g}", "completions/mean_length", 1.0),
            ("tool calls {:.2g}", "tools/call_frequency", 1.0),
            ("of them failed {:.0f} %", "tools/failure_frequency", 100.0),
        ),
        "policy": _phrases(
            shares,
            ("KL {:.3g}", "kl", 1.0),
            ("entropy {:.3g}", "entropy", 1.0),
            # For an engine in other processes, this shows whether it samples from the policy.
            *((("mismatch {:.2g}", "mismatch/mean", 1.0),) if "engine/lost" in recent[-1] else ()),
        ),
        "time": [*_time_split(recent), *([f"memory {memory}"] if memory else [])],
    }
    span = f"means of {counted(len(recent), 'step')}" if len(recent) > 1 else ""
    return ProgressLine(step, max_steps, progress, reward, rows, span)


def _phrases(means: Row, *shown: tuple[str, str, float]) -> list[str]:
    """Phrases of the means that are known. A share of 0 % says something only of the signal."""
    phrases = [
        text.format(scale * mean)
        for text, name, scale in shown
        if math.isfinite(mean := means.get(name, math.nan))
    ]
    return [text for text in phrases if not text.endswith(" 0 %") or text.startswith("signal")]


def _time_split(recent: Sequence[Row]) -> Iterator[str]:
    phases = dict.fromkeys(n for row in recent for n in row if n.startswith("time/"))
    spent = {name: math.fsum(row.get(name, 0.0) for row in recent) for name in phases}
    total = math.fsum(spent.values())
    if total > 0:
        shares = {n.removeprefix("time/"): 100 * s / total for n, s in spent.items()}
        yield from (f"{name} {share:.0f} %" for name, share in shares.items() if round(share))
    rate = _recent_mean(recent, "tokens_per_second/sample")
    if math.isfinite(rate):
        yield f"samples {rate:,.0f} tokens/s"


def _recent_mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return fmean(values) if values else math.nan
