"""Profiles a rollout and its updates with torch's profiler; writes a Chrome trace and a report."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rloo.model.memory_estimate import allocations, peak_between, recorded_events, silence_profiler
from rloo.tracking.jsonl import write_text

TRACE, REPORT = "trace.json", "report.md"
NUM_OPERATORS = 10
_PREFIX = "phase: "


class StepProfile:
    """A profile of some work. Use the object as a context around the work, and `phase` as a context
    around each part of the work; then call `write`."""

    def __init__(self, device: torch.device) -> None:
        silence_profiler()
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._cuda
        # On CUDA the peaks come from the allocator's statistics.
        self._profiler = profile(activities=activities, profile_memory=not self._cuda)
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, int] = defaultdict(int)
        self.total: float = 0.0

    def __enter__(self) -> StepProfile:
        self._profiler.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.total = time.perf_counter() - self._start
        self._profiler.__exit__(*error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the work; parts of the same name are summed."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with record_function(_PREFIX + name):
            yield
        self._seconds[name] += time.perf_counter() - start
        if self._cuda:
            peak = torch.cuda.max_memory_allocated()
            self._peaks[name] = max(self._peaks[name], peak)

    def write(self, folder: Path, *, title: str, slowdown: float | None) -> list[str]:
        """Write the trace and the report; return the report's lines. `slowdown` is the time per
        token relative to the previous rollout, which was not profiled (None: unknown)."""
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / TRACE))
        averages = list(self._profiler.key_averages())
        cost = "The profiler's own cost is unknown: no rollout came before this one."
        if slowdown is not None:
            cost = (
                f"This rollout took {slowdown:.2f} times as long per token as the previous one, "
                "which was not profiled. The profiler slows short operators most, so trust shares "
                "more than seconds."
            )
        lines = [
            f"# {title}",
            "",
            *self._phase_table({e.key: e.self_cpu_time_total / 1e6 for e in averages}),
            "",
            *self._operator_table(averages),
            "",
            cost,
            f"To see every operator in order, open {folder / TRACE} in https://ui.perfetto.dev or "
            "chrome://tracing.",
        ]
        write_text(folder / REPORT, "\n".join(lines) + "\n")
        return lines

    def _phase_table(self, idle: dict[str, float]) -> list[str]:
        if not self._cuda:
            self._peaks = self._cpu_peaks()
        rows = [("phase", "seconds", "share", "outside operators", "peak memory")]
        for name, seconds in self._seconds.items():
            outside, peak = idle.get(_PREFIX + name, 0.0), self._peaks[name] / 1e6
            rows.append((name, *self._shown(seconds), f"{outside:.3f} s", f"{peak:,.1f} MB"))
        rest = self.total - sum(self._seconds.values())
        rows.append(("the rest", *self._shown(rest), "", ""))
        rows.append(("all", *self._shown(self.total), "", ""))
        resident = psutil.Process().memory_info().rss / 1e6
        meaning = (
            "Peak memory is all memory that torch holds on the GPU."
            if self._cuda
            else "Peak memory counts tensors allocated since the rollout began; the whole process "
            f"occupies {resident:,.0f} MB, weights and libraries included."
        )
        return [
            *_table(rows),
            "",
            "The phases are those of `time/...` in metrics.jsonl. Outside operators torch computed "
            "nothing: Python, rewards, waiting.",
            meaning,
        ]

    def _shown(self, seconds: float) -> tuple[str, str]:
        return f"{seconds:.3f}", f"{100 * seconds / self.total:.1f} %"

    def _operator_table(self, averages: list[Any]) -> list[str]:
        def own(event: Any) -> float:
            return (event.self_device_time_total if self._cuda else event.self_cpu_time_total) / 1e6

        operators = [
            event
            for event in sorted(averages, key=own, reverse=True)
            if event.device_type == torch.autograd.DeviceType.CPU
            and not event.is_user_annotation
            and not event.key.startswith((_PREFIX, "[memory]"))
        ]
        rows = [("operator", "own time", "share", "calls")]
        for event in operators[:NUM_OPERATORS]:
            seconds, share = self._shown(own(event))
            rows.append((event.key, f"{seconds} s", share, f"{event.count:,}"))
        where = "on the GPU" if self._cuda else "on the CPU"
        return [
            f"The {len(rows) - 1} most expensive operators by their own time {where}, without the "
            "operators that they call:",
            "",
            *_table(rows),
        ]

    def _cpu_peaks(self) -> dict[str, int]:
        times, totals = allocations(self._profiler)
        peaks: dict[str, int] = defaultdict(int)
        for event in recorded_events(self._profiler):
            if not event.name().startswith(_PREFIX):
                continue
            start, name = event.start_ns(), event.name().removeprefix(_PREFIX)
            peak = peak_between(times, totals, start, start + event.duration_ns())
            peaks[name] = max(peaks[name], peak)
        return peaks


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A Markdown table, aligned to be readable as plain text; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))

    def line(row: Sequence[str]) -> str:
        cells = row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])
        return f"| {' | '.join(cells)} |"

    return [line(row) for row in (rows[0], rule, *rows[1:])]


class PhaseTimer:
    """Measures the seconds of each phase since the last call of `take`, under the names of the
    metrics, and the wall time of the run: `before` are the seconds of earlier sessions. If
    `profile` is set, the profile also records the phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.profile: StepProfile | None = None
        self.current: str = ""
        self.before: float = 0.0
        self.start()

    def start(self) -> None:
        """Begin a session."""
        self._started = time.perf_counter()

    @property
    def session_seconds(self) -> float:
        """Wall time of this session."""
        return time.perf_counter() - self._started

    @property
    def run_seconds(self) -> float:
        """Wall time of this run, including earlier sessions."""
        return self.before + self.session_seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase `name`. `current` is this name until the next
        phase."""
        start, self.current = time.perf_counter(), name
        with self.profile.phase(name) if self.profile else nullcontext():
            yield
        self.seconds[f"time/{name}"] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds so far, and reset all phases to 0."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken
