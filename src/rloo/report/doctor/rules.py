"""All rules, and what they find: after a run, while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo.report.comparison import WINDOW
from rloo.report.doctor import completions, data, rewards, signal, training
from rloo.report.doctor.finding import Finding, Found, Rule, Run

# A cause comes before what follows from it.
RULES: tuple[Rule, ...] = (
    *data.RULES,
    *signal.RULES[:6],
    *training.RULES[:1],
    *rewards.RULES,
    *completions.RULES,
    *training.RULES[1:],
    *signal.RULES[6:],
)
# Rollouts before which nothing is said of a run that goes on.
PATIENCE = 4


def diagnose(run: Run) -> list[Finding]:
    """What is wrong with a run, causes first, without what follows from another finding."""
    findings: dict[str, Finding] = {}
    for rule in RULES:
        if not findings.keys() & set(rule.follows) and (found := rule.find(run)) is not None:
            findings[rule.name] = _finding(rule, found, run)
    return list(findings.values())


def _finding(rule: Rule, found: Found, run: Run) -> Finding:
    return Finding(
        rule.name,
        rule.title,
        found.evidence,
        rule.why,
        found.change,
        run.command(found.options) if found.options else "",
        tuple(found.examples),
        rule.voids if found.voids is None else found.voids,
    )


class Watch:
    """The same rules over a run that is under way, of which it keeps the first rollouts and the
    last ones. What it has `told` it does not tell again."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.facts: Mapping[str, Any] = {}
        self.told: set[str] = set()
        self._first: list[Kept] = []
        self._last: deque[Kept] = deque(maxlen=WINDOW)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics.jsonl."""
        if "reward" in row:
            kept = Kept([], [])
            (self._first if len(self._first) < WINDOW else self._last).append(kept)
        if self._first:
            self._newest.rows.append(row)

    def add_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take rows of completions.jsonl of rollouts that were added."""
        kept = {part.rows[0].get("step"): part for part in (*self._first, *self._last)}
        for row in rows:
            if row["step"] in kept:
                kept[row["step"]].completions.append(row)

    def news(self) -> list[Finding]:
        """What was not told yet."""
        kept = [*self._first, *self._last]
        run = Run(
            [row for part in kept for row in part.rows],
            [row for part in kept for row in part.completions],
            config=self.config,
            facts=self.facts,
            over=False,
        )
        early = len(kept) < PATIENCE
        found = [] if early and not self.facts else diagnose(run)
        found = [f for f in found if f.name not in self.told and not (early and f.voids)]
        self.told |= {finding.name for finding in found}
        return found

    @property
    def _newest(self) -> Kept:
        return self._last[-1] if self._last else self._first[-1]


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a rollout: rows of metrics.jsonl and of completions.jsonl."""

    rows: list[Mapping[str, Any]]
    completions: list[Mapping[str, Any]]
