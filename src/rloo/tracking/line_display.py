"""The plain-line display of a run, for any output, and the base class of the terminal view."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from textwrap import TextWrapper
from typing import Any

import psutil
from rich.console import Console, RenderableType

from rloo.tracking.console import LONGEST_LINE, Row, flow, write_line
from rloo.tracking.progress_line import ProgressLine, progress_line
from rloo.types import Group

SECONDS_BETWEEN_LINES = 10.0
_INDENT = 2


class LineDisplay:
    """Prints the lines of a run. If printing fails (the terminal or reader is gone, the stream is
    closed), printing stops and the run continues. The method `step` takes 3 us if it prints no
    line.

    A subclass that shows a live view on terminals (if `moves` is true) overrides `is_live`,
    `sample`, `stop` and the methods with an underscore.
    """

    # The last step with a printed completion.
    sampled_at = 0

    def __init__(
        self, console: Console | None, *, max_steps: int, silent: bool, moves: bool = True
    ) -> None:
        self.console: Console = nowhere() if silent else console or make_console()
        self._max_steps = max_steps
        self._progress: Callable[..., ProgressLine] | None = None
        self._said = -math.inf
        self._began: float | None = None
        self._spent = 0.0
        self._device = "cpu"

    @property
    def is_live(self) -> bool:
        """Whether a live view is shown, and not only lines."""
        return False

    def start(self, facts: Mapping[str, str], device: str) -> None:
        """Print the facts of a run on `device`, whose memory later lines show."""
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
        """Print phrases in as many lines as needed: of the terminal's width, or of less than 120
        characters for a file or a pipe. A phrase is never broken."""
        width = self.console.width if self.is_live else LONGEST_LINE
        for line in flow(phrases, width, _INDENT):
            self.say(line, style)

    def show(self, content: RenderableType) -> None:
        """Print a table."""
        with self._printing():
            self.console.print(content)

    def alarm(self, text: str, why: str = "", change: str = "") -> None:
        """Print an alarm in colour, the reason, and the change to try."""
        self.say(f"alarm: {text}", "bold red", prose=True)
        if why:
            self.say(f"why: {why}", "yellow", prose=True)
        if change:
            self.say(f"try: {change}", "yellow")

    def remember(self, step: int, metrics: Row) -> None:
        """Add a step's metrics to the live view, if there is one."""

    def evaluated(self, step: int, metrics: Mapping[str, Any], dataset: str = "") -> None:
        """Add an evaluation to the live view, if there is one."""

    def step(self, step: int, *, scored: Sequence[Row], recent: Sequence[Row], due: bool) -> None:
        """Show the state after a step: print a line if `due`, or 10 s after the last line."""
        now = time.monotonic()
        self._progress = partial(
            progress_line,
            step,
            self._max_steps,
            scored=scored,
            recent=recent,
            waiting=self._waiting(now, recent[-1]),
        )
        self._show_step(now, self._progress, due=due)

    def sample(self, step: int, group: Group) -> None:
        """Print a completion of `group` above a live view, if there is one."""

    def stop(self) -> None:
        """Leave the last state of a live view on the screen, and restore the terminal."""

    def _show_step(self, now: float, progress: Callable[..., ProgressLine], *, due: bool) -> None:
        if due or now - self._said >= SECONDS_BETWEEN_LINES:
            line = progress(memory=self._memory()).line()
            self._said = now
            self.say(line)

    def _end_view(self) -> None:
        """Remove a live view because printing failed."""

    def _memory(self) -> str:
        """The resident memory of this process, or on CUDA the peak memory allocated by torch."""
        from rloo.model.token_budget import gigabytes

        if self._device.startswith("cuda"):
            most = sys.modules["torch"].cuda.max_memory_allocated(self._device)
            return f"at most {gigabytes(most)}"
        return gigabytes(psutil.Process().memory_info().rss)

    def _waiting(self, now: float, metrics: Row) -> float:
        """Time since the first step of this session, divided by the sum of the step times."""
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
            self.console = nowhere()
            self._end_view()


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich's method would end the run


def make_console() -> Console:
    """Return a console on stdout. Forced colours (FORCE_COLOR) do not make a pipe a terminal."""
    console = _Output()
    try:
        moves = console.file.isatty()
    except (AttributeError, ValueError):
        moves = False
    console.is_interactive = console.is_interactive and moves
    return console


def nowhere() -> Console:
    """Return a console that prints nothing."""
    return Console(quiet=True, force_terminal=False, force_interactive=False, force_jupyter=False)
