"""Draws the end of a real run of the embedded task as in a terminal.

    python tools/run_picture.py docs/pictures/run.svg --eval_strategy steps --eval_steps 10

Further arguments are options of `rloo train`. The picture has the output of the run's console from
step FROM on, and its last view. The picture uses the fonts of the viewer and no other host.
"""

import re
import sys
from pathlib import Path

from rich.console import Console
from transformers import TrainerCallback

from rloo.addons.report.live import screen
from rloo.cli import EMBEDDED
from rloo.config.parsing import parse_command_line
from rloo.tracking import line_display
from rloo.trainer.trainer import RLOOTrainer

WIDTH, HEIGHT = 100, 60
FROM = 40


class LastView:
    """A live display that shows only the last view, as it stays in a terminal."""

    def __init__(self, console):
        self.console = console

    def show(self, view):
        """Do nothing: the picture is static."""

    def stop(self, view):
        """Print the view."""
        self.console.print(view)


class Forget(TrainerCallback):
    """Removes the output before step FROM from the picture."""

    def __init__(self, console):
        self.console = console

    def on_step_begin(self, args, state, control, **kwargs):
        """Clear the record."""
        if state.global_step == FROM:
            self.console.export_text(clear=True)


def main(path, options):
    """Train, and write the picture."""
    console = Console(record=True, width=WIDTH, height=HEIGHT, force_terminal=True)
    line_display.make_console, screen.region_of = lambda: console, LastView
    config = parse_command_line([str(EMBEDDED), *options])
    RLOOTrainer(args=config, callbacks=[Forget(console)]).train()
    drawn = console.export_svg(title=" ".join(["$ rloo train", *options]))
    drawn = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", drawn, flags=re.DOTALL)
    fonts = "Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    drawn = re.sub(r"font-family: (Fira Code, monospace|arial)", f"font-family: {fonts}", drawn)
    drawn = "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip()) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
