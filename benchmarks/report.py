"""Measured steps to medians, ratios and markdown tables. Knows nothing of processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.floors import Floor, Shape, count_decode_bytes, count_floor
from benchmarks.workloads import FAMILIES

Record = Mapping[str, Any]
# A side that computes while others are measured would disturb them, and hide work of its own.
_IDLE_SHARE = 0.05
# On a CPU every side computes all the time; with less than this on the CPU something held it up.
_BUSY_SHARE = 0.85


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
    """A side's measured steps. Microseconds are per completion token; `phases` has `sample` and
    `update` (all log-prob passes, backward and optimizer); `floor` is the mean of the steps'."""

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
    """All log-prob passes, with gradient or not, the backward and the optimizer's step."""
    return float(step["phases"].get("score", 0.0) + step["phases"].get("update", 0.0))


def floors(result: Record) -> list[Floor]:
    """The floor of each measured step; the warm-up took the first prompts."""
    job = result["job"]
    size, group = job["num_prompts"], job["num_generations"]
    found = []
    for number, step in enumerate(result["steps"], 1):
        prompts = result["prompt_tokens"][number * size : (number + 1) * size]
        lengths = step["lengths"]
        found.append(
            count_floor(
                Shape.of(job["config"]),
                prompts,
                [lengths[start : start + group] for start in range(0, len(lengths), group)],
                iterations=job["options"].get("num_iterations", 1),
                reference=job["options"]["beta"] != 0,
                frozen=job["lora"],
                cache_number_bytes=2 if job["cuda"] else 4,
            )
        )
    return found


def summarise(result: Record, machine: Mapping[str, Any]) -> Summary:
    """Medians and spreads of a result's steps, and the shares of the floor that they reach."""
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
    """Seconds that the floor needs at this machine's rates, over those measured (medians)."""
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


# -- text ------------------------------------------------------------------------------------------


def describe_machine(machine: Mapping[str, Any]) -> str:
    rate = f"{machine['matrix_rate'] / 1e9:.0f} GFLOP/s at {machine.get('matrix_threads')} threads"
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {machine['threads']} threads for every side; "
        f"Python {machine['python']}, torch {machine['torch']}; float32 matrix product of 2,048: "
        f"{rate}; memory read at {machine['bandwidth'] / 1e9:.0f} GB/s"
    )


def not_measured(name: str, title: str) -> str:
    command = f"`python -m benchmarks.peers --workload {name}` on a machine with a CUDA device"
    return f"### {name}: {title}\n\nnot measured: no CUDA device here; {command}"


def render(name: str, results: Sequence[Record], machine: Mapping[str, Any]) -> str:
    """A workload's section: tables, ratios, shares of the floor, what was not measured."""
    measured = [r for r in results if r["steps"]]
    if name in FAMILIES:
        parts = [f"### {name}"]
        parts += [_growth(name, measured, machine)] if measured else []
    else:
        job = results[0]["job"]
        parts = [f"### {name}: {job['title']}"]
        summaries = [summarise(result, machine) for result in measured]
        if summaries:
            parts += [_table(summaries), _facts(measured, summaries)]
            parts += [_ratios(measured, summaries)] if len(summaries) > 1 else []
    for result in results:
        if "error" in result:
            label = f"{result['side']}, {result['job']['name']}"
            parts.append(f"- {label}: not measured to the end: {result['error']}")
    return "\n\n".join(parts)


def _table(summaries: Sequence[Summary]) -> str:
    head = [
        "",
        "s a step",
        "µs per completion token",
        "CPU µs per token",
        "sampling, µs per token",
        "update, µs per token",
        "peak above weights, MiB",
        "share of floor: step / sampling / update",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for summary in summaries:
        cells = [
            summary.side,
            summary.seconds.show(".2f"),
            summary.whole.show(".0f"),
            summary.cpu.show(".0f"),
            *(
                summary.phases[phase].show(".0f") if phase in summary.phases else "-"
                for phase in ("sample", "update")
            ),
            f"{summary.above_weights_mib:.0f}",
            " / ".join(
                f"{summary.shares[key]:.0%}" if key in summary.shares else "-"
                for key in ("whole", "sample", "update")
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _facts(results: Sequence[Record], summaries: Sequence[Summary]) -> str:
    """One line a side: how many steps, lengths, phases, versions."""
    lines = []
    for result, summary in zip(results, summaries, strict=True):
        phases = ", ".join(f"{n} {value:.3f}" for n, value in summary.raw_phases.items())
        versions = ", ".join(f"{k} {v}" for k, v in result["warm_up"]["facts"].items())
        extra = ""
        if "with prompts" in summary.shares:
            share = summary.shares["with prompts"]
            extra = f"; floor with the prompts' passes in the update: {share:.0%}"
        idle = sum(s["idle_cpu_seconds"] for s in result["steps"])
        waited = sum(s["cpu_seconds"] < _BUSY_SHARE * s["seconds"] for s in result["steps"])
        if waited and not result["job"]["cuda"]:
            extra += f"; {waited} STEPS IN WHICH IT HAD TO WAIT FOR THE MACHINE"
        if idle > max(0.1, _IDLE_SHARE * sum(s["idle_seconds"] for s in result["steps"])):
            extra += f"; COMPUTED {idle:.1f} s WHILE OTHERS WERE MEASURED"
        lines.append(
            f"- {summary.side}: {len(result['steps'])} steps, warm-up "
            f"{result['warm_up']['seconds']:.1f} s; {summary.tokens:.0f} tokens a completion, "
            f"{summary.truncated:.0%} truncated; seconds: {phases}{extra} ({versions})"
        )
    return "\n".join(lines)


def _ratios(results: Sequence[Record], summaries: Sequence[Summary]) -> str:
    """Every other side over the first, of medians per completion token; in brackets the ratios of
    the steps that were measured one after the other."""
    first, ours = results[0], summaries[0]
    head = [
        "whole step",
        "the same in CPU time",
        "sampling",
        "update",
        f"peak of {ours.side} / its",
    ]
    lines = [f"| / {ours.side} | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for result, theirs in zip(results[1:], summaries[1:], strict=True):
        cells = ["-"] * len(head)
        sampled = theirs.phases["sample"], ours.phases["sample"]
        cells[2] = _ratio(*sampled, result, first, lambda s: s["phases"]["sample"])
        if "update" in theirs.phases and "update" in ours.phases:
            cells[0] = _ratio(theirs.whole, ours.whole, result, first, lambda s: s["seconds"])
            cells[1] = _ratio(theirs.cpu, ours.cpu, result, first, lambda s: s["cpu_seconds"])
            updates = theirs.phases["update"], ours.phases["update"]
            cells[3] = _ratio(*updates, result, first, update_seconds)
            cells[4] = f"{ours.above_weights_mib / theirs.above_weights_mib:.2f}x"
        lines.append(f"| {theirs.side} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(
    theirs: Spread, ours: Spread, a: Record, b: Record, seconds: Callable[[Record], float]
) -> str:
    pairs = [
        (seconds(x) / sum(x["lengths"])) / (seconds(y) / sum(y["lengths"]))
        for x, y in zip(a["steps"], b["steps"], strict=False)
    ]
    return f"**{theirs.median / ours.median:.2f}x** ({min(pairs):.2f}..{max(pairs):.2f})"


def _growth(name: str, results: Sequence[Record], machine: Mapping[str, Any]) -> str:
    """How the cost changes along a family, beside the change that the floor predicts."""
    by_answers = name == "LEN"
    unit = "token" if by_answers else "completion"
    head = [
        "",
        "side",
        f"µs per {unit}",
        "sampling",
        "update",
        "over the first",
        "floor over its first",
        "measured / floor",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    firsts: dict[str, tuple[float, float]] = {}
    for result in results:
        summary = summarise(result, machine)
        units = 1.0 if by_answers else summary.tokens
        floor = _floor_per_token(result, machine) * units
        cost = summary.whole.median * units
        first_cost, first_floor = firsts.setdefault(result["side"], (cost, floor))
        grown, predicted = cost / first_cost, floor / first_floor
        phases = [
            f"{summary.phases[p].median * units:.0f}" if p in summary.phases else "-"
            for p in ("sample", "update")
        ]
        whole = Spread(cost, summary.whole.low * units, summary.whole.high * units)
        cells = [
            result["job"]["title"],
            result["side"],
            whole.show(".0f"),
            *phases,
            f"{grown:.2f}x",
            f"{predicted:.2f}x",
            f"**{grown / predicted:.2f}x**",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _floor_per_token(result: Record, machine: Mapping[str, Any]) -> float:
    """Seconds a completion token: arithmetic at the matrix rate, the cache at the bandwidth."""
    found = floors(result)
    operations = sum(floor.operations + floor.prompt_passes for floor in found)
    read = sum(floor.cache_bytes for floor in found)
    tokens = sum(sum(step["lengths"]) for step in result["steps"])
    return (operations / machine["matrix_rate"] + read / machine["bandwidth"]) / tokens
