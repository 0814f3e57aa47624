"""Observers: outputs of a run's events, in addition to its files and its console lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo import plugins
from rloo.config.config import RLOOConfig
from rloo.tracking.finding import Finding

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The options and the folder of an observed run. `say` prints a line. `note` prints a line that
    the summary repeats. `found` prints an alarm of a step and records the alarm in alarms.jsonl."""

    config: RLOOConfig
    folder: Path
    say: Callable[[str], object]
    note: Callable[[str], object]
    found: Callable[[int, Finding], object]


class Observer:
    """Receives the events of a run, in the main process only, and never changes training. Methods
    that a subclass does not override do nothing. If a method raises, the run notes the error, and
    the observer gets no more events."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run

    def on_resume(self, files: Mapping[str, Sequence[Row]]) -> None:
        """Called if the run resumes. `files` are the run's rows so far, by file name."""

    def on_start(self, parts: Any, sets: Mapping[str, Any]) -> None:
        """Called before the first step. `parts` is a `TrainerComponents`; `sets` are the evaluation
        prompts by name."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with a row of metrics.jsonl."""

    def on_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Called with rows of completions.jsonl, after their step."""

    def on_evaluation(self, row: Row) -> None:
        """Called with a row of evaluations.jsonl."""

    def on_error(self, error: BaseException) -> None:
        """Called if an error or a signal ends the run."""

    def on_finish(self, summary: Mapping[str, Any]) -> Sequence[Finding]:
        """Called at the end, before the summary is written. Return the problems found."""
        return ()

    def on_end(self) -> None:
        """Called when all files of the run are written."""

    def on_repeat(self) -> None:
        """Called if a finished run is started again, so that no step is left to train."""


class Observers:
    """All installed observers. If an observer fails, a note names it."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._all: dict[str, Observer] = {}
        for name in plugins.names("observers"):
            if (make := plugins.find("observers", name)) is not None:
                self._all[name] = make(run)

    def notify(self, event: str, *arguments: Any) -> list[Any]:
        """Call the method `event` of each observer. Return the results that are not None."""
        found = []
        for name, observer in list(self._all.items()):
            try:
                found.append(getattr(observer, event)(*arguments))
            except Exception as error:  # an observer must not end the run
                del self._all[name]
                self._run.note(
                    f"the observer {name} is told nothing more: {event} raised "
                    f"{type(error).__name__}: {error}"
                )
        return [each for each in found if each is not None]
