"""Where a run is shown: a live view below finished lines on a terminal and in a notebook, elsewhere
plain lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from textwrap import TextWrapper
from typing import Any

import psutil
from rich.console import Console, RenderableType

from rloo.addons.report.live.live_display import (
    SECONDS_BETWEEN_REFRESHES,
    Plot,
    StatusView,
    make_console,
    nowhere,
    region_of,
)
from rloo.addons.report.live.text_plot import TextCurve
from rloo.tracking.console import Row, flow, held_out, write_line
from rloo.tracking.progress_line import ProgressLine, progress_line
from rloo.tracking.sample_text import sample_table
from rloo.types import Group

SECONDS_BETWEEN_LINES = 10.0
STEPS_BETWEEN_SAMPLES = 5
_INDENT = 2


class Screen:
    """Prints lines, and shows the state after each step. Printing that fails (terminal or reader
    are gone, the stream is closed) ends the printing, not the run.

    Where nothing `moves` there is no view on a terminal either. A step costs 3 us where nothing is
    drawn, and 2 ms where the view is, which it is at most four times a second (one core of a
    server, 140 columns, after 3,000 steps).
    """

    def __init__(
        self, console: Console | None, *, max_steps: int, silent: bool, moves: bool = True
    ) -> None:
        self.console = nowhere() if silent else console or make_console()
        self._max_steps = max_steps
        self._region = region_of(self.console) if moves else None
        self._told: Callable[..., ProgressLine] | None = None
        self._drawn = self._said = -math.inf
        self._reward = TextCurve()
        self._held_out: Plot | None = None
        self._followed: str | None = None  # the evaluation set whose curve is shown
        self._alarms: list[tuple[int, str]] = []
        self._started = ""
        self._step, self.sampled_at = 0, -STEPS_BETWEEN_SAMPLES
        self._began: float | None = None
        self._spent = 0.0
        self._device = "cpu"

    @property
    def is_live(self) -> bool:
        """Whether a view is shown, and not only lines."""
        return self._region is not None

    def start(self, facts: Mapping[str, str], device: str) -> None:
        """Print the facts of a run on `device`, whose memory is shown later."""
        self._device = device
        indent = max(map(len, facts)) + 2
        width = max(2 * indent, self.console.width) if self.is_live else sys.maxsize
        wrapper = TextWrapper(
            width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        for name, fact in facts.items():
            for line in wrapper.wrap(f"{name:{indent}}{fact}"):
                self.say(line)

    def say(self, text: str, style: str = "", *, prose: bool = False) -> None:
        """Print a line; see `write_line`."""
        with self._printing():
            write_line(self.console, text, style, prose=prose)

    def tell(self, phrases: Sequence[str], style: str = "") -> None:
        """Print phrases in one line, or on a terminal in as many as they need."""
        width = self.console.width if self.is_live else sys.maxsize
        for line in flow(phrases, width, _INDENT):
            self.say(line, style)

    def show(self, content: RenderableType) -> None:
        """Print a table."""
        with self._printing():
            self.console.print(content)

    def alarm(self, text: str, why: str = "", change: str = "") -> None:
        """Print an alarm in colour, why it matters, and the change to try; the view keeps it."""
        self._alarms.append((self._step, text))
        self.say(f"alarm: {text}", "bold red", prose=True)
        if why:
            self.say(f"why: {why}", "yellow", prose=True)
        if change:
            self.say(f"try: {change}", "yellow")

    def remember(self, step: int, metrics: Row) -> None:
        """Take a step's reward into the curve."""
        self._step = step
        self._reward.add(step, metrics.get("reward", math.nan))

    def evaluated(self, step: int, metrics: Mapping[str, Any], dataset: str = "") -> None:
        """Take an evaluation into the curve, which is that of the first set."""
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

    def step(self, step: int, *, scored: Sequence[Row], recent: Sequence[Row], due: bool) -> None:
        """Show the state after a step. A line of it stays where one is `due`; where there is no
        view, also after 10 s."""
        now = time.monotonic()
        self._told = partial(
            progress_line,
            step,
            self._max_steps,
            scored=scored,
            recent=recent,
            waiting=self._waiting(now, recent[-1]),
        )
        since, least = (
            (self._drawn, SECONDS_BETWEEN_REFRESHES)
            if self._region
            else (self._said, SECONDS_BETWEEN_LINES)
        )
        if not due and now - since < least:
            return
        told = self._told(memory=_memory(self._device))
        if self._region is None:
            self._said = now
            self.say(told.line())
            return
        if due:
            self.tell(told.brief())
        self._drawn = now
        with self._printing():
            if self._region is not None:  # printing has not failed just now
                self._region.show(self._make_view(told))

    def sample(self, step: int, group: Group) -> None:
        """Print a completion of `group` above the view, where one is shown, every few steps."""
        every = STEPS_BETWEEN_SAMPLES
        if self._region is None or step // every == self.sampled_at // every:
            return
        self.sampled_at = step
        self.show(sample_table(step, group, 0, self.console.encoding))

    def stop(self) -> None:
        """Draw the last state, leave it in view, and give the terminal back."""
        with self._printing():
            if self._region is not None and self._told is not None:
                told = self._told(memory=_memory(self._device))
                self._region.stop(self._make_view(told))
        self._told = None

    def _make_view(self, told: ProgressLine) -> StatusView:
        title, *below = told.reward
        plots = [Plot(self._reward, f"training {title}", below, "cyan")]
        plots += [self._held_out] if self._held_out else []
        return StatusView(told, plots, self._alarms)

    def _waiting(self, now: float, metrics: Row) -> float:
        """Time since the first step of this session, over that of the steps themselves."""
        if self._began is None:
            self._began = now
            return 1.0
        self._spent += metrics.get("step_time", 0.0)
        return max(1.0, (now - self._began) / self._spent) if self._spent > 0 else 1.0

    @contextmanager
    def _printing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not getattr(self.console.file, "closed", False):
                raise
            region, self._region, self.console = self._region, None, nowhere()
            with suppress(OSError, ValueError):  # sys.stdout is given back all the same
                if region is not None:
                    region.stop("")


def _memory(device: str) -> str:
    """What this process occupies, or on CUDA the most that torch has held."""
    from rloo.model.token_budget import gigabytes

    if device.startswith("cuda"):
        return f"at most {gigabytes(sys.modules['torch'].cuda.max_memory_allocated(device))}"
    return gigabytes(psutil.Process().memory_info().rss)
