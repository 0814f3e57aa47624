"""Applies the rules to an active run. An error in a rule does not end the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloo.addons.report.doctor.rules import diagnose
from rloo.addons.report.doctor.run_record import LONGEST, RecordedRun
from rloo.tracking.before_after import WINDOW_ROLLOUTS
from rloo.tracking.finding import Finding
from rloo.tracking.guarded import Note, attempt, warn

# The fewest rollouts and completions from which the rules are applied to an active run.
PATIENCE, FEWEST = 4, 32


class LiveDoctor:
    """Applies the rules to an active run. Only the first and the last rollouts are stored. `told`
    are the names of findings that were already reported. Errors of rules are passed to `note`."""

    def __init__(self, config: Mapping[str, Any], note: Note = warn) -> None:
        self.config = config
        self._note = note
        self.facts: Mapping[str, Any] = {}
        self.told: set[str] = set()
        self._first: list[RecentRollout] = []
        self._last: deque[RecentRollout] = deque(maxlen=WINDOW_ROLLOUTS)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of metrics.jsonl."""
        if "reward" in row:
            kept = RecentRollout([], [])
            (self._first if len(self._first) < WINDOW_ROLLOUTS else self._last).append(kept)
        if self._first:
            self._newest.rows.append(row)

    def add_completions(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows of completions.jsonl. The row of metrics.jsonl of the same rollout must have
        been added before."""
        kept = {part.rows[0].get("step"): part for part in (*self._first, *self._last)}
        for row in rows:
            if (part := kept.get(row.get("step"))) is not None:
                part.completions.append(row)

    def news(self) -> list[Finding]:
        """The findings that are not reported yet."""
        return attempt("what is wrong with the run", self._news, [], self._note)

    def _news(self) -> list[Finding]:
        kept = [*self._first, *self._last]
        run = RecordedRun(
            [row for part in kept for row in part.rows],
            [row for part in kept for row in part.completions],
            config=self.config,
            facts=self.facts,
            over=False,
        )
        early = len(kept) < PATIENCE or run.completions_of(run.rollouts) < FEWEST
        tells = self.facts.keys() - {LONGEST}  # LONGEST does not indicate a fault
        found = [] if early and not tells else diagnose(run, self._note)
        found = [f for f in found if f.name not in self.told and not (early and f.voids)]
        self.told |= {finding.name for finding in found}
        return found

    @property
    def _newest(self) -> RecentRollout:
        return self._last[-1] if self._last else self._first[-1]


@dataclass(frozen=True, slots=True)
class RecentRollout:
    """The stored rows of a rollout, from metrics.jsonl and from completions.jsonl."""

    rows: list[Mapping[str, Any]]
    completions: list[Mapping[str, Any]]
