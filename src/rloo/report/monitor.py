"""Shows a run and records it: console, JSON files, and the callbacks and loggers of transformers.

Everything here watches; nothing touches training, except that a callback may set flags on the
`TrainerControl` that the loop reads. What the lines say is in `console.py` and `verdict.py`.
"""

from __future__ import annotations

import math
import platform
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.console import Group as Lines
from rich.live import Live
from rich.text import Text as RichText

from rloo import __version__
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig, resolve_interval
from rloo.data.images import images_of, save_images, without_images
from rloo.report.console import (
    WINDOW,
    completions_table,
    evaluation_line,
    header,
    inert,
    mean_reward,
    progress,
    progress_bar,
    spread,
    write_line,
)
from rloo.report.metrics import window_mean
from rloo.report.records import append_rows, truncate_rows, write_json
from rloo.report.verdict import verdict
from rloo.types import Group

if TYPE_CHECKING:
    from rloo.report.callbacks import Events

METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
SUMMARY = "summary.json"

SECONDS_BETWEEN_LINES = 10.0
NUM_RECORDED_COMPLETIONS = 4
REWARD = ("reward", "reward/standard_error")
DRIFTS = ("kl", "entropy", "completions/mean_length", "groups/signal")
# Of these a window's last value says more than its mean.
LAST_VALUE = ("num_tokens", "learning_rate")


class Monitor:
    """The console and the files of one run; its folder must exist when the first line is written.

    Steps count finished optimizer steps, from 1. Order: `truncate_after` when resuming, then
    `start`, `attach`, the calls of the loop, and `finish`, which also restores the terminal and so
    must be reached when training fails.
    """

    def __init__(
        self,
        config: RLOOConfig,
        output_dir: Path,
        *,
        max_steps: int,
        console: Console | None = None,
        quiet: bool = False,
    ) -> None:
        self.config = config
        self.output_dir = output_dir
        self.max_steps = max_steps
        self.notes: list[str] = []
        self._console = Console(quiet=True) if quiet else console or Console()
        self._every = resolve_interval(config.logging_steps, max_steps)
        self._scored: list[Mapping[str, float]] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._refused_steps = 0
        self._told_of_unscored = False
        self._live: Live | None = None
        self._last_line = (0, -math.inf)
        self._last_table = 0
        self._window: list[Mapping[str, float]] = []
        self._losses: list[float] = []
        self._events: Events | None = None

    # -- the console and the files ---------------------------------------------------------------

    def start(self, info: Mapping[str, Any], batches: Batches) -> None:
        """Print the header: `info` (model, parameters, rewards, ...), rollout and objective."""
        for line in header(info, self.config, batches):
            self.say(line)

    def note(self, text: str) -> None:
        """Print a line that the user must see, and keep it for the summary."""
        self.notes.append(text)
        self.say(f"note: {text}")

    def truncate_after(self, step: int) -> None:
        """Drop what was recorded after `step`, and torn lines, so that no step occurs twice."""
        for name in (METRICS, COMPLETIONS, EVALUATIONS):
            rows, unreadable = truncate_rows(self.output_dir / name, step)
            if name == METRICS:
                for row in rows:
                    self._remember({n: value for n, value in row.items() if value is not None})
            if unreadable:
                self.note(f"{name}: {unreadable} unreadable line(s) dropped")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one line in metrics.jsonl and move the progress line.

        On a terminal it is live; elsewhere a plain line at every log or after 10 seconds.
        """
        append_rows(self.output_dir / METRICS, [{"step": step, **metrics}])
        if (unscored := metrics.get("reward/unscored")) and not self._told_of_unscored:
            self._told_of_unscored = True
            self.note(
                f"in step {step} every reward function returned None for {unscored:.0f} "
                "completions, which are left out; later ones are counted in reward/unscored"
            )
        self._remember(metrics)
        if self.config.disable_tqdm:
            return
        lines = progress(step, self.max_steps, scored=self._scored, recent=list(self._recent))
        if self._console.is_interactive:
            self._show_live([f"{progress_bar(step, self.max_steps)} {lines[0]}", *lines[1:]])
            return
        last_step, last_time = self._last_line
        waited = time.monotonic() - last_time >= SECONDS_BETWEEN_LINES
        if waited or self._log_between(last_step, step) or step == self.max_steps:
            self._last_line = (step, time.monotonic())
            self.say(" | ".join(line for line in lines if line))

    def completions(self, step: int, groups: Sequence[Group]) -> None:
        """Record some completions of a rollout; at a log with `log_completions` record all, and
        print them."""
        first = self.config.logging_first_step and self._last_table == 0
        due = self.config.log_completions and (first or self._log_between(self._last_table, step))
        chosen = list(spread(groups))[: None if due else NUM_RECORDED_COMPLETIONS]
        append_rows(self.output_dir / COMPLETIONS, [self._record(step, *item) for item in chosen])
        if due:
            self._last_table = step
            table = completions_table(
                step,
                _printable(groups),
                limit=self.config.num_completions_to_print,
                encoding=self._console.encoding,
                unique_prompts=self.config.log_unique_prompts,
            )
            self._console.print(table)

    def _record(self, step: int, group: Group, index: int) -> dict[str, Any]:
        content = group.prompt.content
        record: dict[str, Any] = {
            "step": step,
            "prompt_id": group.prompt.id,
            "prompt": without_images(content),
            "completion": group.texts[index],
            "reward": group.rewards[index],
            "scores": {name: values[index] for name, values in group.scores.items()},
            "finish": group.completions[index].finish,
            "extras": {name: values[index] for name, values in group.extras.items()},
        }
        if self.config.log_multimodal and images_of(content):
            record["images"] = save_images(content, self.output_dir)
        return record

    def evaluation(
        self, step: int, name: str, metrics: Mapping[str, Any], *, dataset: str = ""
    ) -> None:
        """Print an evaluation and record it in evaluations.jsonl; `dataset` tells one of several
        sets."""
        of_set = {"dataset": dataset} if dataset else {}
        append_rows(
            self.output_dir / EVALUATIONS, [{"step": step, "name": name, **of_set, **metrics}]
        )
        place = f"{name}, {dataset}" if dataset else name
        self.say(f"evaluation ({place}) at step {step}: {evaluation_line(metrics)}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json whole or not at all, and print the verdict and where the results are.

        `summary`: status, steps, start and end (metrics of the evaluations, empty where none was
        made), wall_seconds, num_tokens, seed, config, versions. Added: max_steps, notes,
        refused_steps, training (first and last steps) and the verdict itself.
        """
        if self._live is not None:
            self._live.stop()
            self._live = None
        whole = {
            **summary,
            "max_steps": self.max_steps,
            "notes": self.notes,
            "refused_steps": self._refused_steps,
            "training": self._compare_training(),
        }
        whole["verdict"] = verdict(whole)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        write_json(self.output_dir / SUMMARY, whole)
        self.say("")
        for line in whole["verdict"].split("\n"):
            self.say(line)
        files = [n for n in (METRICS, COMPLETIONS, EVALUATIONS) if (self.output_dir / n).exists()]
        self.say(f"Results in {self.output_dir}: {', '.join([SUMMARY, *files])}")
        if self._events is not None:
            if self._window:
                self._flush()
            self._events.send("on_train_end")

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._recent.append(metrics)
        self._refused_steps += bool(metrics.get("update/nonfinite"))
        loss = metrics.get("loss", 0.0)  # where nothing had signal there is none
        self._losses += [loss] if math.isfinite(loss) else []
        if "reward" in metrics:  # only the first step on a rollout brings rewards
            self._scored.append({n: metrics[n] for n in REWARD + DRIFTS if n in metrics})

    def _compare_training(self) -> dict[str, Any] | None:
        size = min(WINDOW, len(self._scored) // 2)
        if size == 0:
            return None
        first, last = (
            {"reward": list(mean_reward(rows))}
            | {name: mean for name, mean in window_mean(rows).items() if name in DRIFTS}
            for rows in (self._scored[:size], self._scored[-size:])
        )
        return {"num_steps": size, "start": first, "end": last}

    def _log_between(self, last: int, step: int) -> bool:
        """Whether a step that is logged lies after `last`, up to and with `step`."""
        return step // self._every > last // self._every

    def say(self, text: str) -> None:
        """Print a line."""
        write_line(self._console, text)

    def _show_live(self, lines: Sequence[str]) -> None:
        texts = [inert(line, self._console.encoding) for line in lines]
        shown = Lines(*(RichText(text, no_wrap=True, overflow="ellipsis") for text in texts))
        if self._live is None:
            self._live = Live(shown, console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(shown, refresh=True)

    # -- transformers' callbacks and loggers -----------------------------------------------------

    def attach(self, events: Events) -> None:
        """Log to these callbacks, and to the history in their state, from now on."""
        self._events = events

    def log(self, metrics: Mapping[str, float]) -> None:
        """Tell the callbacks that a step ended; at a log also the mean of each metric since the
        last log, under Trainer's and TRL's names, which is appended to `state.log_history`."""
        assert self._events is not None
        self._window.append(dict(metrics))
        self._events.send("on_step_end")
        if self._events.control.should_log:
            self._flush()

    def log_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation's numbers, named as Trainer does. Intervals are left to
        evaluations.jsonl: loggers take numbers only."""
        assert self._events is not None
        numbers = numbers_of(metrics)
        self.log_numbers(numbers)
        self._events.send("on_evaluate", metrics=numbers)

    def log_totals(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Log what Trainer logs at the end, with the mean loss of all steps; returns it."""
        assert self._events is not None
        whole = {**totals, "train_loss": fmean(self._losses) if self._losses else 0.0}
        if self._window:
            self._flush()
        self.log_numbers(whole)
        return {**whole, "epoch": self._events.state.epoch}

    def _flush(self) -> None:
        means = window_mean(self._window)
        last = {name: row[name] for row in self._window for name in LAST_VALUE if name in row}
        self._window = []
        self.log_numbers(means | last)

    def log_numbers(self, logs: Mapping[str, float]) -> None:
        """Append those that are finite to `state.log_history`, and tell the callbacks."""
        assert self._events is not None
        state = self._events.state
        finite = {name: value for name, value in logs.items() if math.isfinite(value)}
        finite["epoch"] = state.epoch
        state.log_history.append({**finite, "step": state.global_step})
        self._events.send("on_log", logs=finite)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without intervals and whatever else loggers do not take."""
    return {name: value for name, value in metrics.items() if isinstance(value, Real)}


def versions() -> dict[str, str]:
    """Versions of what determines a result."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **libraries, "rloo": __version__}


def _printable(groups: Sequence[Group]) -> list[Group]:
    return [
        replace(g, prompt=replace(g.prompt, content=without_images(g.prompt.content)))
        for g in groups
    ]
