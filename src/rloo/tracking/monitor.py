"""Shows and records a run: console, JSON files, and the callbacks and loggers of transformers.

The monitor does not change training. Only callbacks may set flags on the `TrainerControl`, which
the loop reads. `line_display.py` prints the lines; `console.py`, `progress_line.py` and
`summary_text.py` compose their text. All other outputs of a run are observers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rloo import plugins
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig, resolve_interval
from rloo.config.vllm_options import tolerance_of
from rloo.distributed.standard_streams import counted
from rloo.tracking import console as view
from rloo.tracking.before_after import WINDOW_ROLLOUTS
from rloo.tracking.completion_tables import log_tables, note_of_unscored, warn_of_unscored
from rloo.tracking.finding import Finding, closing
from rloo.tracking.guarded import attempt
from rloo.tracking.jsonl import (
    ALARMS,
    COMPLETIONS,
    EVALUATIONS,
    GROUPS,
    HISTOGRAMS,
    METRICS,
    SUMMARY,
    write_json,
)
from rloo.tracking.line_display import LineDisplay
from rloo.tracking.metrics import window_mean
from rloo.tracking.observer import ObservedRun, Observers
from rloo.tracking.run_rows import JsonlWriter
from rloo.tracking.sample_text import completions_table, record_of, spread
from rloo.tracking.summary_text import DRIFTS, REWARD, is_of_function, summary_text, training_of
from rloo.types import Group

if TYPE_CHECKING:
    from rloo.tracking.callbacks import Events

NUM_RECORDED_COMPLETIONS = 4
# The number of intervals of a run. At the first rollout of each, groups are recorded in full.
MOMENTS = 8
# The files with rows of steps.
BY_STEP = (METRICS, COMPLETIONS, GROUPS, HISTOGRAMS, ALARMS)
# Metrics that are logged as the last value of a window, not as its mean.
LAST_VALUE = ("num_tokens", "learning_rate", "grad_norm")


class Monitor:
    """The console output of a run, and its files in `folder`, which exists before the first step.

    Step numbers count finished optimizer steps, from 1. The order of calls is: `load_state_dict` if
    the run resumes, `start`, `attach`, the calls of the loop, and `finish`. `finish` also restores
    the terminal, so it must be called even if training fails. With `silent`, on ranks other than
    the main rank, the monitor only sends events to the callbacks.
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
        self.config = config
        self.max_steps = max_steps
        self.output_dir: Path = folder
        self.notes: list[str] = []
        self.last_groups: Sequence[Group] = ()
        self._silent = silent
        display = plugins.find("parts", "live_display") or LineDisplay
        self._screen: LineDisplay = display(
            console, max_steps=max_steps, silent=silent, moves=not config.disable_tqdm
        )
        self._journal = JsonlWriter(folder, (*BY_STEP, EVALUATIONS))
        run = ObservedRun(config, folder, self.say, self.note, self._found)
        self._observers = None if silent else Observers(run)
        self._every = resolve_interval(config.logging_steps, max_steps)
        self._scored: list[Mapping[str, float]] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW_ROLLOUTS)
        self._told_of_unscored = self._told_of_mismatch = self._warned_of_unscored = False
        self._refused_steps = self._last_table = 0
        self._epoch, self._epoch_ended = 0, False  # of the last step, and whether it ended an epoch
        self._steps_per_rollout = 1
        self.window: list[Mapping[str, float]] = []  # the metrics of steps since the last log
        self._losses: list[float] = []
        self._events: Events | None = None
        self._log: Callable[[dict[str, float]], object] = self.log_numbers

    def start(self, info: Mapping[str, Any], batches: BatchSizes) -> None:
        """Print the header: `info` (model, parameters, rewards, ...), rollout and objective."""
        self._steps_per_rollout = batches.steps_per_rollout
        facts = view.header(info, self.config, batches)
        self._screen.start(facts, str(info.get("device", "cpu")))

    def _tell_of_mismatch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Alarm once if the log-probs of an engine in other processes differ from the trainer's.
        Only the first step on a rollout is checked: later steps have other weights."""
        limit, found = tolerance_of(self.config), metrics.get("mismatch/mean", 0.0)
        fresh = metrics.get("staleness/max", 0.0) == 0.0  # older weights have other log-probs
        if "engine/lost" in metrics and fresh and found > limit and not self._told_of_mismatch:
            self._told_of_mismatch = True
            self.alarm(
                f"in step {step} the log-probs of the engine and of the trainer are {found:.3g} "
                f"apart in the mean (mismatch/mean), more than {limit:g}: what is sampled is not "
                "the policy that is trained (engine_kwargs.tolerance, rollout_dtype)"
            )

    def note(self, text: str) -> None:
        """Print a note that the user must see, once. The summary repeats all notes."""
        if text not in self.notes:
            self.notes.append(text)
            self._screen.say(f"note: {text}", "yellow", prose=True)

    def alarm(self, text: str, why: str = "", change: str = "") -> None:
        """Print an alarm in red: the problem, with figures; the reason why it matters; and the
        options to change. A live view shows the last alarm. The summary lists all alarms among its
        notes."""
        reasons = (("why", why), ("try", change))
        self.notes.append("; ".join([text, *(f"{word}: {said}" for word, said in reasons if said)]))
        self._screen.alarm(text, why, change)

    def state_dict(self) -> dict[str, Any]:
        """Return the logging state for a checkpoint, including rows that are not written yet. All
        other rows are first synced to disk, since the checkpoint does not contain them."""
        self._journal.sync()
        rows = {name: list(rows) for name, rows in self._journal.waiting.items()}
        return {"waiting": rows, "window": len(self.window), "last_table": self._last_table}

    def load_state_dict(self, saved: Mapping[str, Any], *, step: int, evaluated_at: int) -> None:
        """Continue from `step`: remove torn lines, and rows of later steps and evaluations, from
        the files, so that no row occurs twice or is missing."""
        if self._silent:
            return
        self._journal.waiting |= saved["waiting"]
        self._last_table = saved["last_table"]
        keep: dict[str, Callable[[Any], bool]]
        keep = dict.fromkeys(BY_STEP, lambda row: row["step"] <= step)
        # The best model is evaluated again at the end of the run.
        keep[EVALUATIONS] = lambda row: row["step"] <= evaluated_at and row.get("name") != "best"
        files: dict[str, Sequence[Mapping[str, Any]]] = {}
        for name, belongs in keep.items():
            rows, unreadable = self._journal.truncate(name, belongs)
            files[name] = [dict(row) for row in rows]
            if name == METRICS:
                for metrics in rows:
                    self._remember(metrics.pop("step"), metrics)
                self.window = [*rows[max(0, len(rows) - saved["window"]) :]]
            for metrics in rows if name == EVALUATIONS else ():
                self._screen.evaluated(metrics["step"], metrics, metrics.get("dataset", ""))
            if unreadable:
                self.note(f"{name}: {counted(unreadable, 'unreadable line')} dropped")
        self._notify("on_resume", files)

    def check_written(self) -> None:
        """At the end of a run, raise the OSError that prevents rows from being written."""
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
        """Append a row to metrics.jsonl and show progress in the live view, if there is one. A line
        is printed at every log, and without a live view also every 10 s. With `disable_tqdm` lines
        are printed only at logs, as by Trainer."""
        self._record(METRICS, [{"step": step, **metrics}])
        if (unscored := metrics.get("reward/unscored")) and not self._told_of_unscored:
            self._told_of_unscored = True
            self.note(note_of_unscored(step, unscored, metrics, self.config))
        self._tell_of_mismatch(step, metrics)
        self._remember(step, metrics)
        self._notify("on_step", step, metrics)
        first = step == 1 and self.config.logging_first_step
        due = first or self._log_between(step - 1, step)
        if due or not self.config.disable_tqdm:
            due = due or step == self.max_steps
            self._screen.step(step, scored=self._scored, recent=list(self._recent), due=due)

    def begin(self, parts: Any, sets: Mapping[str, Any]) -> None:
        """Notify observers before the first step: see `Observer.on_start`."""
        self._notify("on_start", parts, sets)

    def failed(self, error: BaseException) -> None:
        """Notify observers of the error that ends the run."""
        self._notify("on_error", error)

    def repeat(self) -> None:
        """Notify observers that a finished run is started again."""
        self._notify("on_repeat")

    def _notify(self, event: str, *arguments: Any) -> list[Any]:
        return [] if self._observers is None else self._observers.notify(event, *arguments)

    def _found(self, step: int, finding: Finding) -> None:
        """Print and record an observer's alarm."""
        self._screen.alarm(finding.line)
        self._record(ALARMS, [{"step": step, "finding": asdict(finding)}])

    def completions(self, step: int, groups: Sequence[Group]) -> None:
        """Record some completions of a rollout. With `log_completions`, at every log, record all of
        them and print some. A live view shows a completion of the first rollout, and later
        completions at logs, but only every few steps."""
        self.last_groups = groups
        if self._silent:
            return
        self._warned_of_unscored = self._warned_of_unscored or warn_of_unscored(groups)
        first = self.config.logging_first_step and self._last_table == 0
        due = self.config.log_completions and (first or self._log_between(self._last_table, step))
        chosen = list(spread(groups))[: None if due else NUM_RECORDED_COMPLETIONS]
        images = self.output_dir if self.config.log_multimodal else None
        rows = [record_of(step, *item, images=images) for item in chosen]
        self._record(COMPLETIONS, rows)
        self._notify("on_completions", step, rows)
        if due:
            self._last_table = step
            table = completions_table(
                step,
                groups,
                limit=self.config.num_completions_to_print,
                encoding=self._screen.console.encoding,
                unique_prompts=self.config.log_unique_prompts,
            )
            self._screen.show(table)
            callbacks = self._events.handler.callbacks if self._events is not None else ()
            log_tables(step, groups, self.config, callbacks)
        elif not self.config.disable_tqdm and self._log_between(self._screen.sampled_at, step):
            self._screen.sample(step, groups[0])

    def groups(self, step: int, detailed: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Record some groups of a rollout in full: for up to nine rollouts, spread from the first
        to the last, and with `log_completions` at every log."""
        number, last = ((n - 1) // self._steps_per_rollout for n in (step, self.max_steps))
        here, before = (n * MOMENTS // max(last, 1) for n in (number, number - 1))
        if not self._silent and (here > before or self._last_table == step):
            rows: Sequence[Mapping[str, Any]] = ()
            rows = attempt("what its groups were in detail", detailed, rows, self.note)
            self._record(GROUPS, [{"step": step, **row} for row in rows])

    def histograms(self, step: int, counted: Callable[[], Mapping[str, Any]]) -> None:
        """Record the histograms of a rollout."""
        if not self._silent:
            row: Mapping[str, Any] = {}
            row = attempt("what its histograms were", counted, row, self.note)
            self._record(HISTOGRAMS, [{"step": step, **row}])

    def evaluation(
        self, step: int, name: str, metrics: Mapping[str, Any], *, dataset: str = ""
    ) -> None:
        """Print and record an evaluation; `dataset` names the set if there are several."""
        row = {"step": step, "name": name} | ({"dataset": dataset} if dataset else {})
        self._record(EVALUATIONS, [{**row, **metrics}])
        self._notify("on_evaluation", {**row, **metrics})
        self._screen.evaluated(step, metrics, dataset)
        head = view.evaluation_head(step, name, dataset)
        first, *others = view.evaluation_phrases(metrics)
        self._screen.tell([f"{head} {first}", *others], "green")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically; print the verdict and the names of the result files.

        `summary` has status, steps, start and end (metrics of the evaluations, empty without
        evaluations), wall_seconds, num_tokens, seed, config and versions. `finish` adds max_steps,
        notes, refused_steps, training (averages of the first and last steps), findings and verdict.
        """
        self._screen.stop()
        findings = [f for found in self._notify("on_finish", summary) for f in found]
        training = partial(training_of, self._scored)
        whole = {
            **summary,
            "max_steps": self.max_steps,
            "notes": self.notes,
            "refused_steps": self._refused_steps,
            "training": attempt("how training went", training, None, self.note),
            "findings": [asdict(finding) for finding in findings],
        }
        judged = partial(summary_text, whole)
        whole["verdict"] = attempt("what the run achieved", judged, "", self.note)
        advice = closing(findings, self.config.output_dir)
        if not self._silent:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            write_json(self.output_dir / SUMMARY, whole)
        for line in ("", *whole["verdict"].split("\n"), *advice):
            self._screen.say(line, "bold", prose=True)
        self._notify("on_end")
        names = (METRICS, COMPLETIONS, EVALUATIONS, GROUPS)
        files = [name for name in names if (self.output_dir / name).exists()]
        results = f"Results in {self.config.output_dir}: {', '.join([SUMMARY, *files])}"
        self._screen.say(results, prose=True)
        if self._events is not None:
            self._flush()
            self._events.send("on_train_end")

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        self._screen.remember(step, metrics)
        self._recent.append(metrics)
        epoch = int(metrics.get("epoch", 0))
        self._epoch, self._epoch_ended = epoch, epoch > self._epoch
        self._refused_steps += bool(metrics.get("update/nonfinite"))
        loss = metrics.get("loss", 0.0)
        self._losses += [loss] if math.isfinite(loss) else []
        if "reward" in metrics:  # only in the first step on a rollout
            kept = {n: v for n, v in metrics.items() if n in REWARD + DRIFTS or is_of_function(n)}
            self._scored.append(kept)

    def _log_between(self, last: int, step: int) -> bool:
        """Whether one of the steps `last` + 1 to `step` is logged."""
        if self.config.logging_strategy == "steps":
            return step // self._every > last // self._every
        return self.config.logging_strategy == "epoch" and self._epoch_ended

    def say(self, text: str) -> None:
        """Print a line."""
        self._screen.say(text)

    def attach(
        self, events: Events, log: Callable[[dict[str, float]], object] | None = None
    ) -> None:
        """Send later events to these callbacks, and log to the history in their state. `log` must
        call `log_numbers`, and is by default `log_numbers`."""
        self._events = events
        self._log = log or self.log_numbers

    def log(self, metrics: Mapping[str, float] | None) -> None:
        """Notify the callbacks that a step ended. At a log, also send the means since the last log.
        `metrics` is None if a resumed run has the step's metrics already."""
        assert self._events is not None
        self.window += [] if metrics is None else [dict(metrics)]
        self._events.send("on_step_end")
        self.log_if_asked()

    def log_if_asked(self) -> None:
        """Log the means since the last log, if a callback requested a log."""
        assert self._events is not None
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
        """The mean loss over all steps of the run; 0 without steps."""
        return fmean(self._losses) if self._losses else 0.0

    def log_totals(self, totals: dict[str, float]) -> dict[str, float]:
        """Log Trainer's totals at the end, with the metrics since the last log; return them."""
        assert self._events is not None
        self._log({**self._since_last_log(), **totals})
        return {**totals, "epoch": self._events.state.epoch}

    def _flush(self) -> None:
        if since := self._since_last_log():
            self._log(since)

    def _since_last_log(self) -> dict[str, float]:
        means = window_mean(self.window)
        last = {name: row[name] for row in self.window for name in LAST_VALUE if name in row}
        self.window = []
        return means | last

    def log_numbers(self, logs: Mapping[str, float]) -> None:
        """Append the finite numbers to `state.log_history` and send them to the callbacks."""
        assert self._events is not None
        state = self._events.state
        finite = {name: value for name, value in logs.items() if math.isfinite(value)}
        finite["epoch"] = state.epoch
        state.log_history.append({**finite, "step": state.global_step})
        self._events.send("on_log", logs=finite)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are plain numbers, as loggers require; intervals are left out."""
    return {name: value for name, value in metrics.items() if isinstance(value, Real)}
