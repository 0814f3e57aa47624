"""A run as its files tell it, and what a rule finds in that. No file is read here."""

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
# Rewards beyond which a gradient may not be finite, and what is done about them.
HUGE_REWARD, CLIPPED_REWARD = 1e6, {"reward_clip_range": [-10.0, 10.0]}
# To which advice raises a learning rate at least; adapters have ten times that.
SMALL_RATE = 1e-6
# The fact that tells the longest completion which the model's context leaves room for.
LONGEST = "longest_completion"
# What is added to a change where hardly any completion has signal.
COLD_START = (
    "; a model that hardly ever finds an answer (a cold start) is trained with examples first"
)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The rows of metrics.jsonl (all, or of a run that is under way its first and last ones), of
    completions.jsonl and evaluations.jsonl, and the resolved options. `facts` are what was counted
    before the first step, `source` what `rloo train` would be given, empty for a script's run. A
    `dry` run has learning rate 0 on purpose; one that is not `over` goes on."""

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
        """The first steps on each rollout, which have the metrics of sampling."""
        return [row for row in self.rows if "reward" in row]

    @property
    def start(self) -> Sequence[Row]:
        """The first rollouts, none of which is among the last ones."""
        return windows(self.rollouts)[0]

    @property
    def end(self) -> Sequence[Row]:
        """The last rollouts, as many as the first ones."""
        return windows(self.rollouts)[1]

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option; `default` where it is null or unknown."""
        value = self.config.get(name)
        return default if value is None else value

    def change(self, name: str) -> BeforeAfter:
        """How a metric of rollouts went from the start to the end."""
        return change_of(self.rollouts, name)

    @property
    def measured(self) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """The first and the last evaluation of the (first) set, if there are two."""
        rows = self.of_first_set
        return (rows[0], rows[-1]) if len(rows) > 1 else None

    @property
    def of_first_set(self) -> list[Mapping[str, Any]]:
        """All evaluations of the (first) set, but for that of the best weights."""
        rows = [row for row in self.evaluations if row.get("name") != "best"]
        return [row for row in rows if row.get("dataset") == rows[0].get("dataset")]

    @property
    def gained(self) -> bool:
        """Whether the reward is higher at the end beyond chance, in training or held out."""
        return any(change.moved == 1 for change in self._to_the_end())

    @property
    def rises(self) -> list[BeforeAfter]:
        """By how much the reward was higher beyond chance than at the start: at the end, first, and
        at any time."""
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
        """Prompts of a rollout, of which one alone knows no error of its reward; 4 if unknown."""
        errors = [row.get("reward/standard_error", math.nan) for row in self.rollouts]
        return int(self.option("num_prompts", 4)) if any(map(math.isfinite, errors)) else 1

    def completions_of(self, rows: Sequence[Row]) -> int:
        """How many completions rollouts have; 8 of each prompt if that is unknown."""
        return len(rows) * self.prompts * int(self.option("num_generations", 8) or 8)

    def texts(self, *, last: bool) -> list[str]:
        """Recorded completions of the last rollouts, or of the first ones."""
        return [text_of_content(row["completion"]) for row in self.recorded(last=last)]

    def recorded(self, *, last: bool) -> list[Mapping[str, Any]]:
        """Rows of completions.jsonl of the last rollouts, or of the first ones."""
        steps = sorted({row["step"] for row in self.completions})
        first, end = windows(steps)
        chosen = set(end if last else first)
        return [row for row in self.completions if row["step"] in chosen]

    def command(self, options: Mapping[str, Any]) -> str:
        """What to run next: these options changed, into a folder of its own."""
        options = {name: _plain(value) for name, value in options.items()}
        if not self.source:
            return f"RLOOConfig({', '.join(f'{k}={v!r}' for k, v in options.items())})"
        again = {**options, "output_dir": f"{self.option('output_dir', 'runs/again')}-again"}
        flags = [word for name, value in again.items() for word in (f"--{name}", *_words(value))]
        return shlex.join(["rloo", "train", *self.source, *flags])


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What a rule has found: figures, examples, and one change, also as options."""

    evidence: str
    change: str
    options: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[str] = ()
    # Where the figures decide whether the run is voided.
    voids: bool | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong. `looks_at` says in which figures it shows, `usual_change` what
    mostly mends it. A run of which a rule that `voids` holds has achieved nothing that counts."""

    name: str
    title: str
    looks_at: str
    why: str
    usual_change: str
    find: Callable[[RecordedRun], RuleResult | None]
    voids: bool = False


def mean(rows: Sequence[Row], name: str) -> float:
    """The mean of a metric over the rows that have it; NaN without any."""
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return fmean(values) if values else math.nan


def highest_rate(rows: Sequence[Row]) -> float:
    """The highest learning rate of the rows; 0 where none tells it."""
    return max(row.get("learning_rate", 0.0) for row in rows)


def band(name: str) -> HealthyRange:
    """The healthy band of a metric, by the one table of metrics."""
    row = find(name)
    assert row is not None and row.band is not None, name
    return row.band


def functions(rows: Sequence[Row]) -> list[str]:
    """The reward functions that rows tell of."""
    names = dict.fromkeys(n for row in rows for n in row if n.startswith("rewards/"))
    return [n.removeprefix("rewards/").removesuffix("/mean") for n in names if n.endswith("/mean")]


def says_nothing(run: RecordedRun) -> str:
    """By what most completions of the first rollouts are empty, "" if they are not."""
    texts, length = run.texts(last=False), mean(run.start, "completions/mean_length")
    blank = fmean(not text.strip() for text in texts) if texts else math.nan
    if run.gained or not (blank >= 0.5 or (not texts and length <= 1.5)):
        return ""
    of = f"{100 * blank:.0f} % of {len(texts)} recorded completions" if texts else "completions"
    return f"{of} were empty from the start, with {length:.3g} tokens in the mean, the end included"


def largest_reward(run: RecordedRun) -> float:
    """The largest mean or deviation of a rollout's rewards, without its sign."""
    seen = [abs(row.get(n, math.nan)) for row in run.rows for n in ("reward", "reward_std")]
    return max(filter(lambda value: not math.isnan(value), seen), default=0.0)


def longer_by(run: RecordedRun, limit: int, times: int = 2) -> tuple[str, dict[str, Any]]:
    """A change to completions of `times` the limit, 2 or 4, or to what the model's context leaves
    beside the longest prompt, in words and as options."""
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
    """Some texts, cut and quoted in one line each."""
    return [repr(t if len(t) <= length else t[:length] + "...") for t in texts[:number]]


def _plain(value: Any) -> Any:
    """Without the digits that a product of floats has of itself."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _words(value: Any) -> list[str]:
    """A value as a command line takes it: a list as several words, a mapping as JSON."""
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        return [str(_plain(item)) for item in value]
    plain = isinstance(value, (str, float)) or (isinstance(value, int) and value is not True)
    return [str(value) if plain and value is not False else json.dumps(value)]
