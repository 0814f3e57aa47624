"""The page of a run, written at its end."""

from __future__ import annotations

from pathlib import Path

from rloo.addons.report.html.document import write_page
from rloo.tracking.jsonl import PAGE
from rloo.tracking.observer import Observer


class PageObserver(Observer):
    """Writes report.html into the run's folder."""

    def on_end(self) -> None:
        """Write the page."""
        folder = self.run.folder
        try:
            write_page([folder], folder / PAGE)
            self.run.say(f"Report: {Path(self.run.config.output_dir) / PAGE}")
        except Exception as error:  # the run is over: what it leaves must not become its error
            self.run.say(f"note: {PAGE} cannot be written: {type(error).__name__}: {error}")

    def on_repeat(self) -> None:
        """Write the page of a finished run that was killed before it could."""
        if not (self.run.folder / PAGE).exists():
            self.on_end()
