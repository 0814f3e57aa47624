"""Shows and records a run: console, JSON files, and the callbacks and loggers of transformers.

It does not change training, except that callbacks may set flags on the `TrainerControl` that the
loop reads. The text of the lines is in `console.py` and `verdict.py`.
"""

from __future__ import annotations

import io
import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rloo import __version__
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig, resolve_interval
from rloo.config.vllm_options import tolerance_of
from rloo.data.images import images_of, save_images, without_images
from rloo.report import console as view
from rloo.report.comparison import WINDOW
from rloo.report.doctor.folder import closing, findings_of
from rloo.report.doctor.rules import Watch
from rloo.report.metrics import window_mean
from rloo.report.records import (
    ALARMS,
    COMPLETIONS,
    EVALUATIONS,
    METRICS,
    SUMMARY,
    Journal,
    write_json,
)
from rloo.report.verdict import DRIFTS, REWARD, is_of_function, training_of, verdict
from rloo.types import Group

if TYPE_CHECKING:
    from rloo.report.callbacks import Events

SECONDS_BETWEEN_LINES = 10.0
NUM_RECORDED_COMPLETIONS = 4
# Metrics that are logged as the last value of a window, not as its mean.
LAST_VALUE = ("num_tokens", "learning_rate", "grad_norm")


class Monitor:
    """The console and the files, in `folder`, of one run; it must exist before the first step.

    Steps count finished optimizer steps, from 1. The order of calls is: `load_state_dict` when
    resuming, then `start`, `attach`, those of the loop, and `finish`. `finish` also restores the
    terminal, so it must be called when training fails, too. One that is `silent`, of a process
    that is not the main one, prints and writes nothing, and only sends the callbacks their events.
    """

    def __init__(
        self,
        config: RLOOConfig,
        folder: Path,
        *,
        max_steps: int,
        console: Console | None = None,
        silent: bool = False,
    ) -> None:
        self.config, self.output_dir, self.max_steps = config, folder, max_steps
        self.notes: list[str] = []
        self._silent = silent
        unread = Path(os.devnull).open("w") if silent else None  # noqa: SIM115 - to the run's end
        self._console = Console(file=unread) if unread else console or Console()
        self._journal = Journal(folder, (METRICS, COMPLETIONS, EVALUATIONS, ALARMS))
        self._watch = Watch(config.to_dict())
        self._every = resolve_interval(config.logging_steps, max_steps)
        self._scored: list[Mapping[str, float]] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._refused_steps = 0
        self._told_of_unscored = self._told_of_mismatch = False
        self._live: view.LiveProgress | None = None
        self._last_line = (0, -math.inf)
        self._last_table = 0
        self.window: list[Mapping[str, float]] = []  # the metrics of steps that no log has yet
        self._losses: list[float] = []
        self._events: Events | None = None
        self._log: Callable[[dict[str, float]], object] = self.log_numbers

    def start(self, info: Mapping[str, Any], batches: Batches) -> None:
        """Print the header: `info` (model, parameters, rewards, ...), rollout and objective."""
        for line in view.header(info, self.config, batches):
            self.say(line)

    def _tell_of_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say once where an engine in other processes disagrees with the trainer, by the first step
        on a rollout: later ones have other weights."""
        limit, found = tolerance_of(self.config), metrics.get("mismatch/mean", 0.0)
        fresh = metrics.get("staleness/max", 0.0) == 0.0  # older weights disagree by right
        if "engine/lost" in metrics and fresh and found > limit and not self._told_of_mismatch:
            self._told_of_mismatch = True
            self.note(
                f"in step {step} the log-probs of the engine and of the trainer are {found:.3g} "
                f"apart in the mean (mismatch/mean), more than {limit:g}: what is sampled is not "
                "the policy that is trained (vllm_tolerance, rollout_dtype)"
            )

    def note(self, text: str) -> None:
        """Print a line that the user must see, and repeat it in the summary."""
        self.notes.append(text)
        self.say(f"note: {text}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: rows that no file has yet, and where logging stands. Has all the
        other rows on the disk first, since the checkpoint counts them."""
        self._journal.sync()
        rows = {name: list(rows) for name, rows in self._journal.waiting.items()}
        return {"waiting": rows, "window": len(self.window), "last_table": self._last_table}

    def load_state_dict(self, saved: Mapping[str, Any], *, step: int, evaluated_at: int) -> None:
        """Go on from `step`: drop what the files have of later steps and evaluations, and torn
        lines, so that nothing occurs twice or is missing."""
        if self._silent:
            return
        self._journal.waiting |= saved["waiting"]
        self._last_table = saved["last_table"]
        keep: dict[str, Callable[[Any], bool]] = {
            METRICS: lambda row: row["step"] <= step,
            COMPLETIONS: lambda row: row["step"] <= step,
            ALARMS: lambda row: row["step"] <= step,
            # The best one is evaluated again at the end of the run.
            EVALUATIONS: lambda row: row["step"] <= evaluated_at and row["name"] != "best",
        }
        for name, belongs in keep.items():
            rows, unreadable = self._journal.truncate(name, belongs)
            if name == METRICS:
                steps = [{n: math.nan if v is None else v for n, v in row.items()} for row in rows]
                for metrics in steps:
                    self._remember(metrics)
                    del metrics["step"]
                self.window = [*steps[len(steps) - saved["window"] :]]
            if name == COMPLETIONS:
                self._watch.add_completions(rows)
            if name == ALARMS:
                self._watch.told |= {row["finding"]["name"] for row in rows}
            if unreadable:
                self.note(f"{name}: {view.counted(unreadable, 'unreadable line')} dropped")

    def check_written(self) -> None:
        """Raise the OSError because of which rows are still in no file, at the end of a run."""
        self._journal.sync()
        for error in self._journal.errors.values():
            raise error

    def _record(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._silent:
            return
        told = name in self._journal.errors
        self._journal.append(name, rows)
        if (error := self._journal.errors.get(name)) and not told:
            self.note(f"{name} cannot be written: {error}; its rows are kept for later")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line to metrics.jsonl and show progress: live on a terminal, elsewhere a plain
        line at every log or after 10 s."""
        self._record(METRICS, [{"step": step, **metrics}])
        if (unscored := metrics.get("reward/unscored")) and not self._told_of_unscored:
            self._told_of_unscored = True
            self.note(
                f"in step {step} every reward function returned {_none(metrics)} for "
                f"{unscored:.0f} completions, which {self._of_unscored()}; later ones are counted "
                "in reward/unscored"
            )
        self._tell_of_mismatch(step, metrics)
        self._remember({"step": step, **metrics})
        self._alarm(step)
        if self.config.disable_tqdm:
            return
        lines = view.progress(step, self.max_steps, scored=self._scored, recent=list(self._recent))
        if self._console.is_interactive:
            with self._printing():
                self._live = self._live or view.LiveProgress(self._console, self.max_steps)
                self._live.show(step, lines)
            return
        last_step, last_time = self._last_line
        waited = time.monotonic() - last_time >= SECONDS_BETWEEN_LINES
        if waited or self._log_between(last_step, step) or step == self.max_steps:
            self._last_line = (step, time.monotonic())
            done, *others = lines
            self.say(f"{done}  {' | '.join(line for line in others if line)}")

    def examine(self, facts: Mapping[str, Any]) -> None:
        """Tell what is wrong by what is known before the first step (see `rloo.run.facts`)."""
        self._watch.facts = facts
        self._alarm(0)

    def _alarm(self, step: int) -> None:
        """Tell what has been found wrong since, and record it."""
        for finding in () if self._silent else self._watch.news():
            self.say(f"alarm: {finding.line}")
            self._record(ALARMS, [{"step": step, "finding": asdict(finding)}])

    def completions(self, step: int, groups: Sequence[Group]) -> None:
        """Record some completions of a rollout; with `log_completions`, at every log, record all
        and print some."""
        if self._silent:
            return
        first = self.config.logging_first_step and self._last_table == 0
        due = self.config.log_completions and (first or self._log_between(self._last_table, step))
        chosen = list(view.spread(groups))[: None if due else NUM_RECORDED_COMPLETIONS]
        rows = [self._completion(step, *item) for item in chosen]
        self._record(COMPLETIONS, rows)
        self._watch.add_completions(rows)
        if due:
            self._last_table = step
            table = view.completions_table(
                step,
                groups,
                limit=self.config.num_completions_to_print,
                encoding=self._console.encoding,
                unique_prompts=self.config.log_unique_prompts,
            )
            with self._printing():
                self._console.print(table)

    def _completion(self, step: int, group: Group, index: int) -> dict[str, Any]:
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
        """Print and record an evaluation; `dataset` names the set if there are several."""
        row = {"step": step, "name": name} | ({"dataset": dataset} if dataset else {})
        self._record(EVALUATIONS, [{**row, **metrics}])
        place = f"{name}, {dataset}" if dataset else name
        self.say(f"evaluation ({place}) at step {step}: {view.evaluation_line(metrics)}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically; print the verdict and the names of the result files.

        `summary` has status, steps, start and end (metrics of the evaluations, empty without any),
        wall_seconds, num_tokens, seed, config and versions. This adds max_steps, notes,
        refused_steps, training (averages of the first and last steps) and the verdict.
        """
        if self._live is not None:
            with self._printing():
                self._live.stop()
            self._live = None
        findings = [] if self._silent else findings_of(self.output_dir, self.config)
        whole = {
            **summary,
            "max_steps": self.max_steps,
            "notes": self.notes,
            "refused_steps": self._refused_steps,
            "training": training_of(self._scored),
            "findings": [asdict(finding) for finding in findings],
        }
        whole["verdict"] = verdict(whole)
        advice = closing(findings, self.config.output_dir)
        if not self._silent:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            write_json(self.output_dir / SUMMARY, whole)
        for line in ("", *whole["verdict"].split("\n"), *advice):
            self.say(line)
        files = [n for n in (METRICS, COMPLETIONS, EVALUATIONS) if (self.output_dir / n).exists()]
        self.say(f"Results in {self.config.output_dir}: {', '.join([SUMMARY, *files])}")
        if self._events is not None:
            self._flush()
            self._events.send("on_train_end")

    def _of_unscored(self) -> str:
        counted = self.config.loss_form.all_completions
        return "count in the loss with advantage 0" if counted else "are left out"

    def _remember(self, metrics: Mapping[str, float]) -> None:
        self._watch.add(metrics)
        self._recent.append(metrics)
        self._refused_steps += bool(metrics.get("update/nonfinite"))
        loss = metrics.get("loss", 0.0)
        self._losses += [loss] if math.isfinite(loss) else []
        if "reward" in metrics:  # only in the first step on a rollout
            kept = {n: v for n, v in metrics.items() if n in REWARD + DRIFTS or is_of_function(n)}
            self._scored.append(kept)

    def _log_between(self, last: int, step: int) -> bool:
        """Whether one of the steps `last` + 1 to `step` is logged."""
        return step // self._every > last // self._every

    def say(self, text: str) -> None:
        """Print a line."""
        with self._printing():
            view.write_line(self._console, text)

    @contextmanager
    def _printing(self) -> Iterator[None]:
        """Printing that fails (terminal or reader are gone, the stream is closed) ends the
        printing, not the run."""
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not getattr(self._console.file, "closed", False):
                raise
            self._live, self._console = None, Console(file=io.StringIO())

    def attach(
        self, events: Events, log: Callable[[dict[str, float]], object] | None = None
    ) -> None:
        """From now on, send events to these callbacks and log to the history in their state: by
        `log`, which calls `log_numbers`, or by that."""
        self._events = events
        self._log = log or self.log_numbers

    def log(self, metrics: Mapping[str, float] | None) -> None:
        """Tell the callbacks that a step ended; at a log, also of the means since the last one.
        None: of a step whose metrics are known from before."""
        assert self._events is not None
        self.window += [] if metrics is None else [dict(metrics)]
        self._events.send("on_step_end")
        if self._events.control.should_log:
            self._flush()

    def log_evaluation(self, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation's numbers under Trainer's names; loggers accept no intervals."""
        assert self._events is not None
        numbers = numbers_of(metrics)
        self._log(numbers)
        self._events.send("on_evaluate", metrics=numbers)

    @property
    def mean_loss(self) -> float:
        """Of all steps of the run; 0 without any."""
        return fmean(self._losses) if self._losses else 0.0

    def log_totals(self, totals: dict[str, float]) -> dict[str, float]:
        """Log what Trainer logs at the end; return it."""
        assert self._events is not None
        self._flush()
        self._log(dict(totals))
        return {**totals, "epoch": self._events.state.epoch}

    def _flush(self) -> None:
        if not self.window:
            return
        means = window_mean(self.window)
        last = {name: row[name] for row in self.window for name in LAST_VALUE if name in row}
        self.window = []
        self._log(means | last)

    def log_numbers(self, logs: Mapping[str, float]) -> None:
        """Append the finite numbers to `state.log_history` and send them to the callbacks."""
        assert self._events is not None
        state = self._events.state
        finite = {name: value for name, value in logs.items() if math.isfinite(value)}
        finite["epoch"] = state.epoch
        state.log_history.append({**finite, "step": state.global_step})
        self._events.send("on_log", logs=finite)


def _none(metrics: Mapping[str, float]) -> str:
    return "NaN or None" if any(name.endswith("/nan") for name in metrics) else "None"


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that are plain numbers, as loggers require; intervals are left out."""
    return {name: value for name, value in metrics.items() if isinstance(value, Real)}


def versions() -> dict[str, str]:
    """The versions of the libraries that determine a result."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return {"python": platform.python_version(), **libraries, "rloo": __version__}
