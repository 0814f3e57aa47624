"""Compares the start of a run with its end, with confidence intervals. All comparisons use this
module, so that their results agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from rloo.tracking.metrics import Z, deviation

T = TypeVar("T")
# The largest number of rollouts in a window.
WINDOW_ROLLOUTS = 8
# With fewer rollouts, the standard error itself is too uncertain.
FEWEST = 3
# 97.5 % points of Student's t with 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """Two means, `before` and `after`, over `size` rollouts each, with their 95 % intervals.
    `moved` is the result of `direction`, or None if it is unknown."""

    before: float
    after: float
    before_bounds: tuple[float, float]
    after_bounds: tuple[float, float]
    size: int

    @classmethod
    def of_errors(cls, before: Sequence[float], after: Sequence[float], size: int) -> BeforeAfter:
        """Compare two means. `before` and `after` each have a mean and its standard error."""
        first, last = ((mean - Z * error, mean + Z * error) for mean, error in (before, after))
        return cls(before[0], after[0], first, last, size)

    @property
    def moved(self) -> int | None:
        """1 for a significant increase (see `direction`), -1 for a significant decrease, else 0.
        None if the result is unknown."""
        known = (self.before, self.after, *self.before_bounds, *self.after_bounds)
        if self.size < FEWEST or not all(map(math.isfinite, known)):
            return None
        return direction(self.before, self.before_bounds, self.after, self.after_bounds)

    @property
    def words(self) -> str:
        """`0.312 to 0.981`"""
        return f"{self.before:.3g} to {self.after:.3g}"


def windows(rows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and the last third of the rows, at most 8 rows each. With two rows, each
    window has one row. A single row is in both windows."""
    size = min(WINDOW_ROLLOUTS, max(1, len(rows) // 3))
    return rows[:size], rows[max(0, len(rows) - size) :]


def change_of(rollouts: Sequence[Mapping[str, float]], name: str) -> BeforeAfter:
    """Compare the mean of a metric in the first rollouts and in the last rollouts. The standard
    error of the mean reward is computed from the standard errors of the rollouts; the standard
    error of another metric, from its spread over rollouts."""
    first, last = (_known(rows, name) for rows in windows(rollouts))
    (before, before_bounds), (after, after_bounds) = _mean(first, name), _mean(last, name)
    return BeforeAfter(before, after, before_bounds, after_bounds, min(len(first), len(last)))


def since_first(rollouts: Sequence[Mapping[str, float]]) -> BeforeAfter:
    """Compare the reward of the first rollout with the last rollouts, for a run that learns within
    its first third. A single rollout has few prompts, so its standard error is doubled, and is at
    least twice the median standard error of all rollouts. If no standard errors are known, the
    first three rollouts take the place of the first rollout."""
    rows = _known(rollouts, "reward")
    errors = [e for row in rows if math.isfinite(e := row.get("reward/standard_error", math.nan))]
    first, (_, last) = rows[: 1 if errors else FEWEST], windows(rows)
    if len(rows) < len(first) + FEWEST:
        return BeforeAfter.of_errors((math.nan, math.nan), (math.nan, math.nan), 0)
    before, error = mean_reward(first)
    if errors:
        error = 2 * max(errors[0], median(errors))
    return BeforeAfter.of_errors((before, error), mean_reward(last), FEWEST)


def change_between(start: Mapping[str, Any], end: Mapping[str, Any], name: str) -> BeforeAfter:
    """Compare a metric of two evaluations, by their 95 % intervals."""
    before, after = (math.nan if of.get(name) is None else of[name] for of in (start, end))
    return BeforeAfter(before, after, _bounds(start, name), _bounds(end, name), FEWEST)


def _bounds(evaluation: Mapping[str, Any], name: str) -> tuple[float, float]:
    if given := evaluation.get(f"{name}_interval"):
        return given[0], given[1]
    value, error = evaluation.get(name), evaluation.get("reward/standard_error")
    if name != "reward" or value is None or error is None:
        return math.nan, math.nan
    return value - Z * error, value + Z * error


def direction(
    before: float, before_bounds: Sequence[float], after: float, after_bounds: Sequence[float]
) -> int:
    """Return 1 if `after` is significantly larger than `before`, -1 if it is significantly smaller,
    else 0. The criterion is the 95 % interval of the difference, computed from the two intervals
    (Newcombe 1998, method 10). The two intervals are treated as independent, which is conservative
    for measurements on the same problems."""
    difference = after - before
    (before_low, before_high), (after_low, after_high) = before_bounds, after_bounds
    if difference - math.hypot(after - after_low, before_high - before) > 0:
        return 1
    if difference + math.hypot(after_high - after, before - before_low) < 0:
        return -1
    return 0


def mean_reward(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the mean reward of the rows and its standard error; NaN if unknown. Steps are treated
    as independent. If a row has no standard error (one prompt), the error comes from the spread
    over steps."""
    known = _known(rows, "reward")
    if not known:
        return math.nan, math.nan
    rewards = [row["reward"] for row in known]
    errors = [row.get("reward/standard_error", math.nan) for row in known]
    error = math.sqrt(math.fsum(e * e for e in errors)) / len(known)
    if not math.isfinite(error):
        error = deviation(rewards) / math.sqrt(len(known))
    return fmean(rewards), error


def _known(rows: Sequence[Mapping[str, float]], name: str) -> list[Mapping[str, float]]:
    return [row for row in rows if math.isfinite(row.get(name, math.nan))]


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> tuple[float, tuple[float, float]]:
    if not rows:
        return math.nan, (math.nan, math.nan)
    if name == "reward":
        mean, error = mean_reward(rows)
        return mean, (mean - Z * error, mean + Z * error)
    values = [row[name] for row in rows]
    mean = fmean(values)
    if len(values) < 2:
        return mean, (math.nan, math.nan)
    half = _T[len(values) - 2] * deviation(values) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)
