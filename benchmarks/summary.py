"""Computes medians and shares of the floor from measured steps, independent of processes and
tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.floors import Floor, Shape, count_decode_bytes, count_floor

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}}..{self.high:{form}})"


@dataclass(frozen=True)
class Summary:
    """A summary of a side's measured steps. Microseconds are per completion token. `phases` has
    `sample` and `update` (all log-prob passes, backward and optimizer). `floor` is the mean floor
    of the steps."""

    side: str
    seconds: Spread
    whole: Spread
    cpu: Spread
    phases: dict[str, Spread]
    raw_phases: dict[str, float]
    above_weights_mib: float
    tokens: float
    truncated: float
    shares: dict[str, float]


def update_seconds(step: Record) -> float:
    """Seconds of all log-prob passes (with and without gradients), the backward and the optimizer's
    step."""
    return float(step["phases"].get("score", 0.0) + step["phases"].get("update", 0.0))


def floors(result: Record) -> list[Floor]:
    """The floor of each measured step."""
    job = result["job"]
    group = job["num_generations"]
    found = []
    for step in result["steps"]:
        lengths = step["lengths"]
        found.append(
            count_floor(
                Shape.of(job["config"]),
                step["prompt_tokens"],
                [lengths[start : start + group] for start in range(0, len(lengths), group)],
                iterations=job["options"].get("num_iterations", 1),
                reference=job["options"]["beta"] != 0,
                frozen=job["lora"],
                cache_number_bytes=2 if job["cuda"] else 4,
            )
        )
    return found


def summarise(result: Record, machine: Mapping[str, Any]) -> Summary:
    """Medians and ranges of a result's steps, and the shares of the floor."""
    steps = result["steps"]
    tokens = [sum(step["lengths"]) for step in steps]

    def per_token(seconds: Callable[[Record], float]) -> Spread:
        return Spread.of([1e6 * seconds(s) / t for s, t in zip(steps, tokens, strict=True)])

    phases = {"sample": per_token(lambda step: step["phases"]["sample"])}
    if result["job"]["kind"] == "step" and any(map(update_seconds, steps)):
        phases["update"] = per_token(update_seconds)
    names = sorted({name for step in steps for name in step["phases"]})
    return Summary(
        side=result["side"],
        seconds=Spread.of([step["seconds"] for step in steps]),
        whole=per_token(lambda step: step["seconds"]),
        cpu=per_token(lambda step: step["cpu_seconds"]),
        phases=phases,
        raw_phases={n: statistics.median(s["phases"].get(n, 0.0) for s in steps) for n in names},
        above_weights_mib=max(s["peak_mib"] - s["loaded_mib"] for s in steps),
        tokens=sum(tokens) / sum(len(step["lengths"]) for step in steps),
        truncated=sum(s["truncated"] for s in steps) / sum(len(s["lengths"]) for s in steps),
        shares=_shares(result, machine, updates="update" in phases),
    )


def _shares(result: Record, machine: Mapping[str, Any], *, updates: bool) -> dict[str, float]:
    """Seconds of the floor at this machine's rates, divided by the measured seconds (medians)."""
    job, shape = result["job"], Shape.of(result["job"]["config"])
    values: dict[str, list[float]] = {}
    for step, floor in zip(result["steps"], floors(result), strict=True):
        rate = machine["matrix_rate"]
        sample, update = floor.sample / rate, floor.update / rate
        if job["cuda"]:
            read = count_decode_bytes(shape, floor, max(step["lengths"]), 2)
            sample = max(sample, read / machine["bandwidth"])
        values.setdefault("sample", []).append(sample / step["phases"]["sample"])
        if updates:
            values.setdefault("update", []).append(update / update_seconds(step))
            values.setdefault("whole", []).append((sample + update) / step["seconds"])
            passes = sample + update + floor.prompt_passes / rate
            values.setdefault("with prompts", []).append(passes / step["seconds"])
    return {name: statistics.median(shares) for name, shares in values.items()}
