"""A run as recorded in its files, and the result of a rule. This module reads no files."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rloo.tracking.before_after import (
    FEWEST,
    BeforeAfter,
    change_between,
    change_of,
    mean_reward,
    since_first,
    windows,
)
from rloo.tracking.finding import text_of_content
from rloo.tracking.metric_registry import HealthyRange, find

Row = Mapping[str, float]
# Rewards above which gradients may overflow, and the options that prevent it.
HUGE_REWARD, CLIPPED_REWARD = 1e6, {"reward_clip_range": [-10.0, 10.0]}
# The lowest learning rate that advice proposes; for adapters ten times as high.
SMALL_RATE = 1e-6
# Name of the fact: the longest completion that fits the model's context.
LONGEST = "longest_completion"
# Appended to advice when hardly any completion has signal.
COLD_START = (
    "; a model that hardly ever finds an answer (a cold start) is trained with examples first"
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records of a run: the rows of metrics.jsonl (of an active run only the first and last
    rows), completions.jsonl and evaluations.jsonl, and the resolved options. `facts` were collected
    before the first step. `source` are the arguments of `rloo train`, empty for a script's run.
    `dry` means that the learning rate is 0 on purpose. `over` is False for an active run."""

    rows: Sequence[Row]
    completions: Sequence[Mapping[str, Any]] = ()
    evaluations: Sequence[Mapping[str, Any]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    source: tuple[str, ...] = ()
    dry: bool = False
    over: bool = True

    @property
    def rollouts(self) -> list[Row]:
        """The rows of the first step on each rollout, which have the sampling metrics."""
        return [row for row in self.rows if "reward" in row]

    @property
    def start(self) -> Sequence[Row]:
        """The first rollouts, which do not overlap with the last rollouts."""
        return windows(self.rollouts)[0]

    @property
    def end(self) -> Sequence[Row]:
        """The last rollouts, as many as the first rollouts."""
        return windows(self.rollouts)[1]

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option, or `default` if it is null or unknown."""
        value = self.config.get(name)
        return default if value is None else value

    def change(self, name: str) -> BeforeAfter:
        """The change of a rollout metric from the start to the end."""
        return change_of(self.rollouts, name)

    @property
    def measured(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The first and the last evaluation of the first evaluation set, if there are two."""
        rows = self.of_first_set
        return (rows[0], rows[-1]) if len(rows) > 1 else None

    @property
    def of_first_set(self) -> list[Mapping[str, Any]]:
        """All evaluations of the first evaluation set, except the evaluation of the best
        weights."""
        rows = [row for row in self.evaluations if row.get("name") != "best"]
        return [row for row in rows if row.get("dataset") == rows[0].get("dataset")]

    @property
    def gained(self) -> bool:
        """Whether the reward, in training or held out, is significantly higher at the end than at
        the start."""
        return any(change.moved == 1 for change in self._to_the_end())

    @property
    def rises(self) -> list[BeforeAfter]:
        """The significant increases of the reward since the start of the run. The increases up to
        the end of the run come first, then the increases up to other times."""
        rows, of_set = [r for r in self.rollouts if math.isfinite(r["reward"])], self.of_first_set
        parts = [rows[at : at + FEWEST] for at in range(0, len(rows) - FEWEST + 1, FEWEST)]
        means = [mean_reward(part) for part in parts]
        meanwhile = [BeforeAfter.of_errors(means[0], later, FEWEST) for later in means[1:]]
        meanwhile += [
            change_between(of_set[0], row, name)
            for row in of_set[1:]
            for name in ("reward", "pass@1")
        ]
        return [change for change in (*self._to_the_end(), *meanwhile) if change.moved == 1]

    def _to_the_end(self) -> list[BeforeAfter]:
        held_out = [change_between(*self.measured, "reward")] if self.measured else []
        return [self.change("reward"), *held_out, since_first(self.rollouts)]

    @property
    def prompts(self) -> int:
        """The number of prompts per rollout (4 if unknown). It is 1 if no rollout has a standard
        error of the reward."""
        errors = [row.get("reward/standard_error", math.nan) for row in self.rollouts]
        return int(self.option("num_prompts", 4)) if any(map(math.isfinite, errors)) else 1

    def completions_of(self, rows: Sequence[Row]) -> int:
        """The number of completions in `rows`, with 8 per prompt if that number is unknown."""
        return len(rows) * self.prompts * int(self.option("num_generations", 8) or 8)

    def texts(self, *, last: bool) -> list[str]:
        """Recorded completions of the last rollouts if `last`, else of the first rollouts."""
        return [text_of_content(row["completion"]) for row in self.recorded(last=last)]

    def recorded(self, *, last: bool) -> list[Mapping[str, Any]]:
        """Rows of completions.jsonl of the last rollouts if `last`, else of the first rollouts."""
        steps = sorted({row["step"] for row in self.completions})
        first, end = windows(steps)
        chosen = set(end if last else first)
        return [row for row in self.completions if row["step"] in chosen]

    def command(self, options: Mapping[str, Any]) -> str:
        """The command for another run with the changed `options` and a new output folder; for a run
        that a script started, an RLOOConfig with the changed `options`."""
        options = {name: _plain(value) for name, value in options.items()}
        if not self.source:
            return f"RLOOConfig({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        again = {**options, "output_dir": f"{self.option('output_dir', 'runs/again')}-again"}
        flags = [word for name, value in again.items() for word in (f"--{name}", *_words(value))]
        return shlex.join(["rloo", "train", *self.source, *flags])


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of a rule that has found its fault: figures, examples, and one change in words and
    options."""

    evidence: str
    change: str
    options: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[str] = ()
    # Set if the figures decide whether the run is voided.
    voids: bool | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one possible fault. `looks_at` names the figures that show the fault,
    `usual_change` the usual remedy. If a rule with `voids` finds its fault, the run's result does
    not count."""

    name: str
    title: str
    looks_at: str
    why: str
    usual_change: str
    find: Callable[[RecordedRun], RuleResult | None]
    voids: bool = False


def mean(rows: Sequence[Row], name: str) -> float:
    """The mean of a metric over the rows with this metric; NaN if there are none."""
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return fmean(values) if values else math.nan


def highest_rate(rows: Sequence[Row]) -> float:
    """The highest learning rate in the rows; rows without a learning rate count as 0."""
    return max(row.get("learning_rate", 0.0) for row in rows)


def band(name: str) -> HealthyRange:
    """The healthy range of a metric, from the metric registry."""
    row = find(name)
    assert row is not None and row.band is not None, name
    return row.band


def functions(rows: Sequence[Row]) -> list[str]:
    """The names of the reward functions in the rows."""
    names = dict.fromkeys(n for row in rows for n in row if n.startswith("rewards/"))
    return [n.removeprefix("rewards/").removesuffix("/mean") for n in names if n.endswith("/mean")]


def says_nothing(run: RecordedRun) -> str:
    """A description of empty first completions, or "" if fewer than half are empty."""
    texts, length = run.texts(last=False), mean(run.start, "completions/mean_length")
    blank = fmean(not text.strip() for text in texts) if texts else math.nan
    if run.gained or not (blank >= 0.5 or (not texts and length <= 1.5)):
        return ""
    of = f"{100 * blank:.0f} % of {len(texts)} recorded completions" if texts else "completions"
    return f"{of} were empty from the start, with {length:.3g} tokens in the mean, the end included"


def largest_reward(run: RecordedRun) -> float:
    """The largest absolute mean, or standard deviation, of the rewards in a step."""
    seen = [abs(row.get(n, math.nan)) for row in run.rows for n in ("reward", "reward_std")]
    return max(filter(lambda value: not math.isnan(value), seen), default=0.0)


def longer_by(run: RecordedRun, limit: int, times: int = 2) -> tuple[str, dict[str, Any]]:
    """Advice, in words and as options: raise the length limit to `times` (2 or 4) times its value,
    or to the tokens that the context leaves after the longest prompt."""
    room = run.facts.get(LONGEST)
    if room is None or times * limit <= room:
        words = {2: "twice", 4: "four times"}[times]
        return f"allow {words} the length", {"max_completion_length": times * limit}
    if room > limit:
        return (
            f"allow {room} tokens, which is all that the model's context leaves beside the longest "
            "prompt",
            {"max_completion_length": room},
        )
    return (
        "shorten the prompts or take a model of a longer context: this one's leaves no more tokens "
        "beside the longest prompt",
        {},
    )


def excerpts(texts: Sequence[str], number: int = 2, length: int = 80) -> list[str]:
    """The first `number` texts, shortened and quoted."""
    return [repr(t if len(t) <= length else t[:length] + "...") for t in texts[:number]]


def _plain(value: Any) -> Any:
    """The value, with floats rounded to three digits."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _words(value: Any) -> list[str]:
    """The command-line words of a value: several for a list, JSON for a mapping."""
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        return [str(_plain(item)) for item in value]
    plain = isinstance(value, (str, float)) or (isinstance(value, int) and value is not True)
    return [str(value) if plain and value is not False else json.dumps(value)]
