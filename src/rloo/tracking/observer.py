"""Observers: what is told of a run's events, beside its files and its lines on the console."""

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
    """The run that an observer is of: its options and its folder. `say` prints a line, `note` one
    that the summary repeats; `found` prints an alarm in a step and records it in alarms.jsonl."""

    config: RLOOConfig
    folder: Path
    say: Callable[[str], object]
    note: Callable[[str], object]
    found: Callable[[int, Finding], object]


class Observer:
    """Is told what happens in a run, by the main process alone. It never changes training. A method
    that a subclass leaves out does nothing. What one raises is a note of the run, and the observer
    is told nothing more."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run

    def on_resume(self, files: Mapping[str, Sequence[Row]]) -> None:
        """The run goes on. `files` are the rows that it has, by the names of the files."""

    def on_start(self, parts: Any, sets: Mapping[str, Any]) -> None:
        """The first step comes next. `parts` is a `TrainerComponents`, `sets` are the prompts of
        evaluations by name."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of metrics.jsonl."""

    def on_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Rows of completions.jsonl, which come after their step."""

    def on_evaluation(self, row: Row) -> None:
        """A row of evaluations.jsonl."""

    def on_error(self, error: BaseException) -> None:
        """The run ends because of an error or a signal."""

    def on_finish(self, summary: Mapping[str, Any]) -> Sequence[Finding]:
        """The run is over, and its summary is about to be written. Returns what was wrong."""
        return ()

    def on_end(self) -> None:
        """All files of the run are written."""

    def on_repeat(self) -> None:
        """A run that has finished is started again, and nothing is to be done."""


class Observers:
    """All observers that are installed. `note` is told which one has failed."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._all: dict[str, Observer] = {}
        for name in plugins.names("observers"):
            if (make := plugins.find("observers", name)) is not None:
                self._all[name] = make(run)

    def notify(self, event: str, *arguments: Any) -> list[Any]:
        """Call this method of each one. Returns what they return, but None."""
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
