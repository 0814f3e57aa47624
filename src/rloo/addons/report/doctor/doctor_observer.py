"""The doctor as an observer: alarms during a run, findings at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rloo.addons.report.doctor.doctor_command import findings_of
from rloo.addons.report.doctor.live_rules import LiveDoctor
from rloo.tracking.finding import Finding
from rloo.tracking.guarded import attempt
from rloo.tracking.jsonl import ALARMS, COMPLETIONS, METRICS
from rloo.tracking.observer import ObservedRun, Observer, Row


class DoctorObserver(Observer):
    """Applies the doctor's rules to a run, after each step and at the end."""

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self._watch = LiveDoctor(run.config.to_dict(), run.note)

    def on_resume(self, files: Mapping[str, Sequence[Row]]) -> None:
        """Load the earlier rows; the earlier alarms are not raised again."""
        for row in files[METRICS]:
            self._watch.add(row)
        self._watch.add_completions(files[COMPLETIONS])
        self._watch.told |= {row["finding"]["name"] for row in files[ALARMS]}

    def on_start(self, parts: Any, sets: Mapping[str, Any]) -> None:
        """Apply the rules to the facts that are known before the first step."""
        from rloo.addons.report.doctor.dataset_stats import facts_of

        self._examine(facts_of(parts, sets))

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Apply the rules to the run so far."""
        self._watch.add({"step": step, **metrics})
        self._tell(step)

    def on_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Store the rows; the rules are applied at the next step."""
        self._watch.add_completions(rows)

    def on_error(self, error: BaseException) -> None:
        """Apply the rules to the error that ends the run."""
        from rloo.addons.report.doctor.dataset_stats import facts_of_error

        self._examine(facts_of_error(error, self.run.note))

    def on_finish(self, summary: Mapping[str, Any]) -> Sequence[Finding]:
        """The findings from all files of the run."""
        read = partial(findings_of, self.run.folder, self.run.config, summary)
        return attempt("what was wrong with the run", read, [], self.run.note)

    def _examine(self, facts: Mapping[str, Any]) -> None:
        if facts:
            self._watch.facts = {**self._watch.facts, **facts}
            self._tell(0)

    def _tell(self, step: int) -> None:
        for finding in self._watch.news():
            self.run.found(step, finding)
