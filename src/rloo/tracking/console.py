"""Console output: header, metrics of a step, evaluations, and number formats.

Text of models and datasets is untrusted: terminal control characters are escaped.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as RichText

from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.config.presets import objective_line
from rloo.distributed.standard_streams import counted, inert

Row = Mapping[str, float]

FUNCTION_MEAN = re.compile(r"rewards/.*/mean", re.DOTALL)
# The most characters of a line of metrics in a file or a pipe.
LONGEST_LINE = 119
# The most characters of a set's name in the line of an evaluation.
_LONGEST_NAME = 49


def shorten(text: str, *, characters: int = 600, lines: int = 12) -> str:
    """Shorten a long text to its start and its end, which mostly contains the answer. The result
    has at most `characters` characters and `lines` lines, and a marker with the size of the omitted
    part."""
    if len(text) > characters:
        half = characters // 2
        text = f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
    rows = text.split("\n")
    if len(rows) > lines + 1:
        half = lines // 2
        rows = [*rows[:half], f"[... {len(rows) - 2 * half} lines ...]", *rows[-half:]]
    return "\n".join(rows)


def flow(phrases: Sequence[str], width: int, indent: int = 0) -> list[str]:
    """Join phrases into lines of at most `width` cells. Lines break only between phrases. The
    second and later lines are indented. A phrase of more than `width` cells is a separate line."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and cell_len(longer := f"{lines[-1]}  {phrase}") <= width:
            lines[-1] = longer
        else:
            lines.append(" " * indent * bool(lines) + phrase)
    return lines


def header(info: Mapping[str, Any], config: RLOOConfig, batches: BatchSizes) -> dict[str, str]:
    """Return the entries of `info` as text, then the precision, the rollout and the objective."""
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "float32"
    prompts, generations = batches.prompts_per_rollout, config.num_generations
    drawn = f"{counted(prompts, 'prompt')} x {counted(generations, 'generation')}"
    rollout = f"{drawn} = {counted(prompts * generations, 'completion')}"
    if batches.steps_per_rollout > 1:
        rollout += f", used for {batches.steps_per_rollout} steps"
    if batches.rollouts_per_version > 1:
        rollout += f", new weights after every {batches.rollouts_per_version} rollouts"
    rows = {**info, "precision": precision, "rollout": rollout, "objective": objective_line(config)}
    return {name: _describe(value) for name, value in rows.items()}


def _describe(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def evaluation_head(step: int, name: str, dataset: str = "") -> str:
    """Return the start of an evaluation's line: `evaluation (end, test) at step 50:`. A long name
    of the set is cut in the middle, so that the first metric fits into a line of 119 characters."""
    if len(dataset) > _LONGEST_NAME:
        half = (_LONGEST_NAME - 3) // 2
        dataset = f"{dataset[:half]}...{dataset[-half:]}"
    place = ", ".join(part for part in (name.replace("during", ""), dataset) if part)
    return f"evaluation{f' ({place})' if place else ''} at step {step}:"


def evaluation_phrases(metrics: Mapping[str, Any]) -> list[str]:
    """Return the phrases of an evaluation: pass@k with 95 % intervals, unless the reward is graded
    (`is_graded`); mean reward, length, and the sample size."""
    parts = [
        f"{name.replace('_', ' ')} {percent(value, metrics.get(f'{name}_interval'))}"
        for name, value in metrics.items()
        if name.startswith("pass@") and not name.endswith("_interval") and not is_graded(metrics)
    ]
    reward = metrics.get("reward", math.nan)
    if math.isfinite(reward):
        error = metrics.get("reward/standard_error", math.nan)
        parts.append(f"reward {plus_minus(reward, error)}")
    if "completions/mean_length" in metrics:
        parts.append(f"length {metrics['completions/mean_length']:.3g}")
    if "num_prompts" in metrics:
        samples = metrics.get("num_samples", 1)
        parts.append(
            f"({counted(metrics['num_prompts'], 'problem')} x {counted(samples, 'sample')})"
        )
    return parts


def is_graded(metrics: Mapping[str, Any]) -> bool:
    """Return whether the first reward is graded, like the score of a reward model, and not pass or
    fail. For a graded reward pass@k has no meaning, and the mean reward is the main metric."""
    return metrics.get("reward_kind") == "graded"


def held_out(metrics: Mapping[str, Any]) -> tuple[str, float, str]:
    """Return the main metric of an evaluation: its name, its value, and a text with the value and
    its error. The metric is pass@1, or the reward if the reward is graded or pass@1 is missing."""
    if "pass@1" in metrics and not is_graded(metrics):
        value = metrics["pass@1"]
        return "pass@1", value, percent(value, metrics.get("pass@1_interval"))
    value = metrics.get("reward", math.nan)
    return "reward", value, plus_minus(value, metrics.get("reward/standard_error", math.nan))


def print_evaluation(metrics: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a headline and one metric per line, by default to stdout."""
    console = console or Console()
    width = console.width if console.is_interactive else LONGEST_LINE
    for line in flow(evaluation_phrases(metrics), width, indent=2):
        write_line(console, line)
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and not name.startswith(("pass@", "loss")):
            write_line(console, f"  {name:40} {value:,.4g}")


def write_line(console: Console, text: str, style: str = "", *, prose: bool = False) -> None:
    """Print untrusted text, without markup, in one style. On a terminal, `prose` is wrapped between
    words. Other lines are not wrapped, so that they can be copied."""
    whole = not (prose and console.is_interactive)
    console.print(safe(text, console, style), highlight=False, soft_wrap=whole)


def safe(text: str, console: Console, style: str = "") -> RichText:
    """Return untrusted text for display: without markup, control characters, or characters that the
    console's encoding lacks."""
    if console.options.ascii_only:
        text = text.replace("±", "+-")
    return RichText(inert(text, console.encoding), style)


def percent(value: float, bounds: Sequence[float] | None = None) -> str:
    """Format a share with its interval: `24.1 % [21.0, 27.5]`."""
    text = f"{100 * value:.1f} %"
    return text if bounds is None else f"{text} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def plus_minus(value: float, error: float, *, signed: bool = False) -> str:
    """Format a value with its error: `0.312 ± 0.041`, or `0.312` if the error is unknown."""
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return f"{text} ± {error:.3f}" if math.isfinite(error) else text


def duration(seconds: float) -> str:
    """Format a number of seconds: `45 s`, `2 min 05 s`, `3 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def clock(seconds: float) -> str:
    """Return the time of day in `seconds` from now, with the date if it is 12 hours away or
    more."""
    then = time.localtime(time.time() + seconds)
    return time.strftime("%H:%M" if seconds < 12 * 3600 else "%a %d %b %H:%M", then)
