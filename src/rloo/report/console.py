"""Text and tables for people: header, progress, completions, evaluations.

Prompts and completions are hostile: what could control a terminal is shown as an escape.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text as RichText

from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig
from rloo.config.presets import objective_line
from rloo.report.comparison import WINDOW, mean_reward, sides
from rloo.types import Group, Text

Row = Mapping[str, float]

_MAX_CHARACTERS = 600
_MAX_LINES = 12


def inert(text: str, encoding: str = "utf-8") -> str:
    """Escape every character of `text`, except newlines, that is not printable (control, direction
    override, surrogate, unassigned) or not in `encoding`. The result cannot move the cursor or set
    colours or titles, and any stream can print it."""
    shown = (
        character
        if character == "\n" or unicodedata.category(character)[0] not in "CZ" or character == " "
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def shorten(text: str) -> str:
    """Keep head and tail, which mostly has the answer: at most 600 characters and 12 lines."""
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
    lines = text.split("\n")
    if len(lines) > _MAX_LINES:
        half = _MAX_LINES // 2
        lines = [*lines[:half], f"[... {len(lines) - 2 * half} lines ...]", *lines[-half:]]
    return "\n".join(lines)


def header(info: Mapping[str, Any], config: RLOOConfig, batches: Batches) -> list[str]:
    """One line per entry of `info`, then the precision, the rollout and the objective."""
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "float32"
    prompts, generations = batches.prompts_per_rollout, config.num_generations
    rollout = f"{prompts} prompts x {generations} generations = {prompts * generations} completions"
    if batches.steps_per_rollout > 1:
        rollout += f", used for {batches.steps_per_rollout} steps"
    rows = {**info, "precision": precision, "rollout": rollout, "objective": objective_line(config)}
    width = max(map(len, rows))
    return [f"{name:{width}}  {_describe(value)}" for name, value in rows.items()]


def _describe(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def progress(
    step: int, max_steps: int, *, scored: Sequence[Row], recent: Sequence[Row]
) -> list[str]:
    """Four lines: progress, change of the reward, state of the policy, use of time. `scored` are
    all steps with rewards, in order; `recent` the last steps, over which metrics are averaged."""
    speed = _recent_mean(recent, "step_time")
    done = f"step {step}/{max_steps}"
    if math.isfinite(speed):
        done += f"  {duration(speed * (max_steps - step))} left"
    learned = f"reward {plus_minus(*mean_reward(scored[-WINDOW:]))}"
    if len(scored) > 1:
        (first, first_error), (now, error) = map(mean_reward, sides(scored))
        change = plus_minus(now - first, math.hypot(error, first_error), signed=True)
        learned += f"  {change} since the start"
    shown = (
        ("signal in {:.0f} % of groups", "groups/signal", 100.0),
        ("KL {:.3g}", "kl", 1.0),
        ("entropy {:.3g}", "entropy", 1.0),
        ("length {:.3g}", "completions/mean_length", 1.0),
        # Where sampling is in other processes it is what tells that all is well.
        *((("mismatch {:.2g}", "mismatch/mean", 1.0),) if "engine/lost" in recent[-1] else ()),
    )
    state = [
        text.format(scale * mean)
        for text, name, scale in shown
        if math.isfinite(mean := _recent_mean(recent, name))
    ]
    return [done, learned, "  ".join(state), "  ".join(_time_split(recent))]


class LiveProgress(Progress):
    """Shows the lines of `progress` live on a terminal, the first one beside a bar."""

    def __init__(self, console: Console, max_steps: int) -> None:
        self._below: list[RichText] = []
        columns = BarColumn(20), TextColumn("{task.description}", markup=False)
        super().__init__(*columns, console=console, auto_refresh=False)
        self._steps = self.add_task("", total=max_steps)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the lines below it: what rich draws."""
        yield self.make_tasks_table(self.tasks)
        yield from self._below

    def show(self, step: int, lines: Sequence[str]) -> None:
        """Show `lines` in place of the previous ones; `stop` leaves the last ones in view."""
        first, *others = (inert(line, self.console.encoding) for line in lines)
        self._below = [RichText(text, no_wrap=True, overflow="ellipsis") for text in others]
        self.update(self._steps, completed=step, description=first)
        self.start()
        self.refresh()


def _time_split(recent: Sequence[Row]) -> Iterator[str]:
    phases = dict.fromkeys(n for row in recent for n in row if n.startswith("time/"))
    spent = {name: math.fsum(row.get(name, 0.0) for row in recent) for name in phases}
    total = math.fsum(spent.values())
    if total > 0:
        shares = (f"{n.removeprefix('time/')} {100 * s / total:.0f} %" for n, s in spent.items())
        yield f"time: {', '.join(shares)}"
    rate = _recent_mean(recent, "tokens_per_second/sample")
    if math.isfinite(rate):
        yield f"samples {rate:,.0f} tokens/s"


def _recent_mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return fmean(values) if values else math.nan


def completions_table(
    step: int,
    groups: Sequence[Group],
    *,
    limit: int | None,
    encoding: str,
    unique_prompts: bool = False,
) -> Table:
    """A table of up to `limit` completions (None: all) with their rewards. Different prompts come
    first; with `unique_prompts` there is only one completion per prompt."""
    table = Table(title=f"Completions at step {step}", show_lines=True, title_justify="left")
    for name in ("Prompt", "Completion", "Reward"):
        table.add_column(name, overflow="fold", ratio=1 if name == "Reward" else 3)
    chosen = list(spread(groups))
    if unique_prompts:  # the same row may have been drawn twice
        seen: dict[str, Group] = {}
        for group in groups:
            seen.setdefault(as_string(group.prompt.content), group)
        chosen = [(group, 0) for group in seen.values()]
    for group, index in chosen[:limit]:
        reward = group.rewards[index]
        scores = [f"{name} {_score(values[index])}" for name, values in group.scores.items()]
        extras = [f"{name}: {str(values[index])[:80]}" for name, values in group.extras.items()]
        cells = (
            as_string(group.prompt.content),
            as_string(group.texts[index]),
            "\n".join([_score(reward), *scores, *extras, group.completions[index].finish]),
        )
        table.add_row(*(RichText(inert(shorten(cell), encoding)) for cell in cells))
    return table


def spread(groups: Sequence[Group]) -> Iterator[tuple[Group, int]]:
    """All completions as (group, index): the first of each group, then the second of each, ..."""
    for index in range(max((len(group.texts) for group in groups), default=0)):
        for group in groups:
            if index < len(group.texts):
                yield group, index


def as_string(text: Text) -> str:
    """A prompt or completion as one string; messages become lines `role: content`."""
    if isinstance(text, str):
        return text
    return "\n".join(f"{message.get('role')}: {_content(message)}" for message in text)


def _content(message: Mapping[str, Any]) -> str:
    parts = message.get("content")
    if not isinstance(parts, list):
        return str(parts)
    return "".join(part.get("text") or f"[{part.get('type')}]" for part in parts)


def _score(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """One line: pass@k with 95 % intervals, mean reward, length, and the sample size."""
    graded = metrics.get("reward_kind") == "graded"  # of which pass@k says nothing
    parts = [
        f"{name.replace('_', ' ')} {percent(value, metrics.get(f'{name}_interval'))}"
        for name, value in metrics.items()
        if name.startswith("pass@") and not name.endswith("_interval") and not graded
    ]
    reward = metrics.get("reward", math.nan)
    if math.isfinite(reward):
        error = metrics.get("reward/standard_error", math.nan)
        parts.append(f"reward {plus_minus(reward, error)}")
    if "completions/mean_length" in metrics:
        parts.append(f"length {metrics['completions/mean_length']:.3g}")
    if "num_prompts" in metrics:
        samples = metrics.get("num_samples", 1)
        parts.append(f"({metrics['num_prompts']:,} problems x {samples} samples)")
    return "  ".join(parts)


def print_evaluation(metrics: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a headline and one metric per line, by default to stdout."""
    console = console or Console()
    write_line(console, evaluation_line(metrics))
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not name.startswith("pass@"):
            write_line(console, f"  {name:40} {value:,.4g}")


def write_line(console: Console, text: str) -> None:
    """Print hostile text, without markup, colours or wrapping."""
    shown = inert(text, console.encoding)
    console.print(shown, markup=False, highlight=False, emoji=False, soft_wrap=True)


def percent(value: float, bounds: Sequence[float] | None = None) -> str:
    """`24.1 % [21.0, 27.5]`"""
    text = f"{100 * value:.1f} %"
    return text if bounds is None else f"{text} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def plus_minus(value: float, error: float, *, signed: bool = False) -> str:
    """`0.312 ± 0.041`, or `0.312` if the error is unknown."""
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return f"{text} ± {error:.3f}" if math.isfinite(error) else text


def counted(number: int, noun: str) -> str:
    """`1 note`, `2 notes`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """`45 s`, `2 min 05 s`, `3 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
