"""Writes the HTML report at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo.addons.report.html.document import write_page
from rloo.tracking.jsonl import FACTS, PAGE, run_facts
from rloo.tracking.observer import Observer
from rloo.tracking.run_reader import read_object


class PageObserver(Observer):
    """Writes report.html into the run's folder."""

    def on_start(self, parts: Any, sets: Mapping[str, Any]) -> None:
        """Record what the summary of a run that does not end lacks."""
        self._record_facts()

    def on_end(self) -> None:
        """Write the page."""
        folder = self.run.folder
        try:
            write_page([folder], folder / PAGE)
            self.run.say(f"Report: {Path(self.run.config.output_dir) / PAGE}")
        except Exception as error:  # a failed report must not fail a finished run
            self.run.say(f"note: {PAGE} cannot be written: {type(error).__name__}: {error}")

    def on_repeat(self) -> None:
        """Write the facts and the report of a finished run that ended before the disk had them."""
        self._record_facts()
        if not (self.run.folder / PAGE).exists():
            self.on_end()

    def _record_facts(self) -> None:
        """A resumed run keeps the record of its first session, unless a power cut left the record
        incomplete: it is not synced."""
        path = self.run.folder / FACTS
        if not read_object(path):
            facts = {"named": sorted(self.run.config.named), **run_facts()}
            path.write_text(json.dumps(facts) + "\n", encoding="utf-8")
