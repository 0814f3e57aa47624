"""A live view of a run below its printed lines, in a terminal or a notebook. Elsewhere only lines
are printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console

from rloo.addons.report.live.live_display import (
    SECONDS_BETWEEN_REFRESHES,
    Plot,
    StatusView,
    region_of,
)
from rloo.addons.report.live.text_plot import TextCurve
from rloo.tracking.console import Row, held_out
from rloo.tracking.line_display import LineDisplay
from rloo.tracking.progress_line import ProgressLine
from rloo.tracking.sample_text import sample_table
from rloo.types import Group

STEPS_BETWEEN_SAMPLES = 5


class Screen(LineDisplay):
    """Prints lines, and shows the state after each step.

    If `moves` is false, there is no live view. Drawing the view takes 2 ms, at most four times a
    second (one core of a server, 140 columns, after 3,000 steps).
    """

    def __init__(
        self, console: Console | None, *, max_steps: int, silent: bool, moves: bool = True
    ) -> None:
        super().__init__(console, max_steps=max_steps, silent=silent, moves=moves)
        self._region = region_of(self.console) if moves else None
        self._drawn = -math.inf
        self._reward = TextCurve()
        self._held_out: Plot | None = None
        self._followed: str | None = None  # the evaluation set whose curve is shown
        self._alarms: list[tuple[int, str]] = []
        self._started = ""
        self._step = 0
        self.sampled_at: int = -STEPS_BETWEEN_SAMPLES

    @property
    def is_live(self) -> bool:
        """Whether there is a live view."""
        return self._region is not None

    def alarm(self, text: str, why: str = "", change: str = "") -> None:
        """Print an alarm and add it to the view."""
        self._alarms.append((self._step, text))
        super().alarm(text, why, change)

    def remember(self, step: int, metrics: Row) -> None:
        """Add a step's reward to the curve."""
        self._step = step
        self._reward.add(step, metrics.get("reward", math.nan))

    def evaluated(self, step: int, metrics: Mapping[str, Any], dataset: str = "") -> None:
        """Add an evaluation to the curve of the first evaluation set. Evaluations of other sets are
        ignored."""
        name, value, words = held_out(metrics)
        self._followed = dataset if self._followed is None else self._followed
        if dataset != self._followed or not math.isfinite(value):
            return
        title = f"held-out {name}{f' ({dataset})' if dataset else ''} {words}"
        if self._held_out is None:
            self._held_out = Plot(TextCurve(), title, [], "green")
            self._started = f"{words} at step {step}"
        else:
            self._held_out.title, self._held_out.below = title, [self._started]
        if name == "pass@1":
            self._held_out.form, value = "{:.0f} %", 100 * value
        self._held_out.curve.add(step, value)

    def sample(self, step: int, group: Group) -> None:
        """Every few steps, print a completion of `group` above the live view. Without a live view,
        nothing is printed."""
        every = STEPS_BETWEEN_SAMPLES
        if self._region is None or step // every == self.sampled_at // every:
            return
        self.sampled_at = step
        self.show(sample_table(step, group, 0, self.console.encoding))

    def stop(self) -> None:
        """Draw the last state, leave it on the screen, and release the terminal."""
        with self._printing():
            if self._region is not None and self._progress is not None:
                self._region.stop(self._make_view(self._progress(memory=self._memory())))
        self._progress = None

    def _show_step(self, now: float, progress: Callable[..., ProgressLine], *, due: bool) -> None:
        """Draw the view; if `due`, also print a permanent line."""
        if self._region is None:
            super()._show_step(now, progress, due=due)
            return
        if not due and now - self._drawn < SECONDS_BETWEEN_REFRESHES:
            return
        shown = progress(memory=self._memory())
        if due:
            self.tell(shown.brief())
        self._drawn = now
        with self._printing():
            if self._region is not None:  # None if printing has just failed
                self._region.show(self._make_view(shown))

    def _end_view(self) -> None:
        region, self._region = self._region, None
        with suppress(OSError, ValueError):  # rich restores sys.stdout even after an error
            if region is not None:
                region.stop("")

    def _make_view(self, shown: ProgressLine) -> StatusView:
        title, *below = shown.reward
        plots = [Plot(self._reward, f"training {title}", below, "cyan")]
        plots += [self._held_out] if self._held_out else []
        return StatusView(shown, plots, self._alarms)
