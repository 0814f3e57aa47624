"""The live view of a run in a terminal or a notebook. The view shows the present state below the
printed lines, and is redrawn after a step.

The training thread draws the view, at most every quarter of a second.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text as RichText

from rloo.addons.report.live.text_plot import TextCurve, bounds, draw
from rloo.tracking.console import flow, safe
from rloo.tracking.progress_line import ProgressLine

SECONDS_BETWEEN_REFRESHES = 0.25
# A terminal with fewer lines gets curves of height 1.
FEWEST_LINES = 20
_NARROWEST_PAIR = 70
_WIDEST = 160
_BAR = 20
_GAP = 2
_LABEL = 9


@dataclass(slots=True)
class Plot:
    """A curve with its title and the text lines below the curve. `form` formats the bounds of the
    curve."""

    curve: TextCurve
    title: str
    below: list[str]
    style: str
    form: str = "{:.3g}"


@dataclass(frozen=True, slots=True)
class StatusView:
    """The state of a run as lines of any width; long lines are folded."""

    figures: ProgressLine
    plots: list[Plot]
    alarms: list[tuple[int, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines that rich prints."""
        width = min(options.max_width, _WIDEST)
        for line in self._lines(console, width):
            line.overflow = "fold"
            yield line

    def _lines(self, console: Console, width: int) -> Iterator[RichText]:
        figures, ascii_only = self.figures, console.options.ascii_only
        full = round(_BAR * figures.step / max(1, figures.max_steps))
        done, left = "=-" if ascii_only else "━─"
        bar = RichText.assemble((done * full, "cyan"), (left * (_BAR - full), "dim"))
        for line in flow(figures.progress, width - _BAR - 2):
            yield RichText.assemble(bar, "  ", safe(line, console, "bold"))
            bar = RichText(" " * _BAR)
        yield from self._curves(console, width)
        for name, phrases in figures.rows.items():
            if phrases:
                yield from _labelled(console, name, phrases, width)
        if figures.span:
            yield safe(f"{' ' * _LABEL}{figures.span}", console, "dim")
        if self.alarms:
            step, text = self.alarms[-1]
            which = f"{len(self.alarms)} alarms, the last" if len(self.alarms) > 1 else "alarm"
            yield safe(f"{which} at step {step}: {text}", console, "bold red")

    def _curves(self, console: Console, width: int) -> Iterator[RichText]:
        pairs = len(self.plots) > 1 and width >= _NARROWEST_PAIR
        each = (width - _GAP) // 2 if pairs else min(width, _WIDEST // 2)
        blocks = [self._block(plot, console, each) for plot in self.plots]
        if not pairs:
            yield from chain(*blocks)
            return
        for left, right in zip_longest(*blocks, fillvalue=RichText()):
            yield RichText.assemble(left, " " * (each + _GAP - left.cell_len), right)

    def _block(self, plot: Plot, console: Console, width: int) -> list[RichText]:
        height = 3 if console.size.height >= FEWEST_LINES else 1
        low, high = map(plot.form.format, bounds(plot.curve.points))
        labels = [high, *[""] * (height - 2), low] if height > 1 else [""]
        margin = max(map(len, labels)) + 1
        drawn = draw(
            plot.curve.points,
            max(1, width - margin),
            height,
            end=float(self.figures.step),
            ascii_only=console.options.ascii_only,
        )
        lines = [
            RichText.assemble((f"{label:>{margin - 1}} ", "dim"), (dots, plot.style))
            for label, dots in zip(labels, drawn, strict=True)
        ]
        above, *below = (
            text.wrap(console, width, overflow="fold")
            for text in (safe(plot.title, console, "bold"), *(safe(t, console) for t in plot.below))
        )
        return [*above, *lines, *chain(*below)]


def _labelled(
    console: Console, name: str, phrases: Sequence[str], width: int
) -> Iterator[RichText]:
    for number, line in enumerate(flow(phrases, width - _LABEL)):
        label = f"{name:{_LABEL}}" if number == 0 else " " * _LABEL
        yield RichText.assemble((label, "dim"), safe(line, console))


class TerminalDisplay:
    """Shows a view at the bottom of a terminal; all printed lines appear above the view."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def show(self, view: Any) -> None:
        """Show `view` in place of the previous one."""
        self._live.start()
        self._live.update(view, refresh=True)

    def stop(self, view: Any) -> None:
        """Leave `view` on the screen and release the terminal."""
        self._live.start()
        self._live.update(view)
        self._live.stop()


class NotebookDisplay:
    """Shows a view in one output of a notebook cell; other output appears below the view."""

    def __init__(self, console: Console) -> None:
        self._width = console.width
        self._handle: Any = None

    def show(self, view: Any) -> None:
        """Show `view` in place of the previous one."""
        from IPython.display import HTML, display

        page = Console(
            record=True, file=io.StringIO(), width=self._width, height=100, force_jupyter=False
        )
        page.print(view)
        form = "<pre style='line-height:1.2;font-family:monospace'>{code}</pre>"
        shown = HTML(page.export_html(inline_styles=True, code_format=form))
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    stop = show


def region_of(console: Console) -> TerminalDisplay | NotebookDisplay | None:
    """The display for a console; None for a file, a pipe or a terminal without cursor control."""
    if console.is_jupyter:
        return NotebookDisplay(console)
    return TerminalDisplay(console) if console.is_interactive else None
