"""Renders measured steps as Markdown tables: costs, ratios, shares of the floor, missing
results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.growth import render_growth
from benchmarks.results import was_disturbed
from benchmarks.summary import Record, Spread, Summary, summarise, update_seconds
from benchmarks.workloads import FAMILIES

# A side that computes while others are measured would disturb them, and hide some of its work.
_IDLE_SHARE = 0.05
# Sides that are also compared with each other. All sides are compared with the first.
_LIKE = {
    "trl:bf16=true": "rloo:bf16=true",
    "vllm:dtype=bfloat16": "rloo:rollout_dtype=bfloat16",
}
NOT_TRIED = (
    "Not tried: TRL with torch_compile or with kernels of the Hub, llama.cpp, OpenRLHF and verl "
    "(they need a GPU), more threads than cores, other allocators."
)


def describe_machine(machine: Mapping[str, Any]) -> str:
    """One line: the processor, threads, versions, and the rates used for floors."""
    rates = ", ".join(
        f"{library} {rate / 1e9:.0f}" for library, rate in machine["library_rates"].items()
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores; {machine['threads']} threads for every side; "
        f"Python {machine['python']}, torch {machine['torch']}; float32 matrix product of 2,048: "
        f"{rates} GFLOP/s at {machine.get('matrix_threads')} threads at best, the floor's is "
        f"{machine['library']}'s; memory read at {machine['bandwidth'] / 1e9:.0f} GB/s"
    )


def not_measured(name: str, title: str) -> str:
    command = f"`python -m benchmarks.peers --workload {name}` on a machine with a CUDA device"
    return f"### {name}: {title}\n\nnot measured: no CUDA device here; {command}"


def render(name: str, results: Sequence[Record], machine: Mapping[str, Any]) -> str:
    """The section of a workload or a family: tables, ratios, shares of the floor, missing
    results."""
    measured = [r for r in results if r["steps"]]
    disturbed = _count_disturbed(measured)
    parts = [f"### {name}"]
    if measured and name in FAMILIES:
        parts.append(render_growth(name, measured, machine, by_cpu=disturbed > 0))
    elif measured:
        parts[0] += f": {measured[0]['job']['title']}"
        summaries = [summarise(result, machine) for result in measured]
        parts += [_table(summaries), _facts(measured, summaries)]
        if len(measured) > 1:
            parts += [_ratios(measured, summaries, by_cpu=disturbed > 0)]
            parts += _by_seeds(measured, by_cpu=disturbed > 0)
    if disturbed:
        total = sum(len(result["steps"]) for result in measured)
        parts.append(
            f"BUSY MACHINE in {disturbed} of {total} steps: read what is in CPU time, which is in "
            "bold type; times of sampling and update are on the wall."
        )
        if machine.get("threads", 1) > 1:
            parts[-1] += " Threads take CPU time while they wait for each other; one has no other."
    parts += _notes(results)
    return "\n\n".join(parts)


def _notes(results: Sequence[Record]) -> Iterator[str]:
    for result in results:
        label = f"{result['side']}, {result['workload']}"
        if "error" in result:
            yield f"- {label}: not measured to the end: {result['error']}"
        if "skipped" in result:
            yield f"- {label}: not measured: {result['skipped']}"
        if result.get("left_out"):
            yield f"- {label}: {result['left_out']} steps left out, of what it was before a change"


def _count_disturbed(results: Sequence[Record]) -> int:
    return sum(was_disturbed(step) for result in results for step in result["steps"])


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
    """One line per side: number of steps, lengths, phases, versions."""
    lines = []
    for result, summary in zip(results, summaries, strict=True):
        phases = ", ".join(f"{n} {value:.3f}" for n, value in summary.raw_phases.items())
        versions = ", ".join(f"{k} {v}" for k, v in result["warm_up"]["facts"].items())
        extra = ""
        if "with prompts" in summary.shares:
            share = summary.shares["with prompts"]
            extra = f"; floor with the prompts' passes in the update: {share:.0%}"
        idle = sum(s["idle_cpu_seconds"] for s in result["steps"])
        if waited := _count_disturbed([result]):
            extra += f"; {waited} STEPS IN WHICH IT HAD TO WAIT FOR THE MACHINE OR TO SHARE IT"
        if idle > max(0.1, _IDLE_SHARE * sum(s["idle_seconds"] for s in result["steps"])):
            extra += f"; COMPUTED {idle:.1f} s WHILE OTHERS WERE MEASURED"
        seeds = len({step["seed"] for step in result["steps"]})
        lines.append(
            f"- {summary.side}: {len(result['steps'])} steps of {seeds} "
            f"seed{'s'[: seeds > 1]}, warm-up {result['warm_up']['seconds']:.1f} s; "
            f"{summary.tokens:.0f} tokens a completion, "
            f"{summary.truncated:.0%} truncated; seconds: {phases}{extra} ({versions})"
        )
    return "\n".join(lines)


# -- ratios ----------------------------------------------------------------------------------------


Seconds = Callable[[Record], float]


def _ratios(results: Sequence[Record], summaries: Sequence[Summary], *, by_cpu: bool) -> str:
    """Ratios of medians per completion token: every other side over the first side, and over a
    similar side. In brackets is the range of the ratios of consecutive steps."""
    head = ["", "whole step", "the same in CPU time", "sampling", "update", "peak, the second's"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    numbers = {summary.side: number for number, summary in enumerate(summaries)}
    for number, summary in enumerate(summaries[1:], 1):
        others = {0, numbers.get(_LIKE.get(summary.side, ""), 0)}
        for other in sorted(others):
            sides = ((results[n], summaries[n]) for n in (number, other))
            cells = _compare(*sides, by_cpu=by_cpu)
            lines.append(
                f"| {summary.side} / {summaries[other].side} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def _compare(
    one: tuple[Record, Summary], other: tuple[Record, Summary], *, by_cpu: bool
) -> list[str]:
    (theirs, a), (ours, b) = one, other
    cells = ["-"] * 5

    def ratio(x: Spread, y: Spread, seconds: Seconds, *, bold: bool) -> str:
        text = f"{x.median / y.median:.2f}x"
        return (f"**{text}**" if bold else text) + _range(theirs, ours, seconds)

    sampled = a.phases["sample"], b.phases["sample"]
    cells[2] = ratio(*sampled, lambda s: float(s["phases"]["sample"]), bold=not by_cpu)
    if "update" in a.phases and "update" in b.phases:
        cells[0] = ratio(a.whole, b.whole, _wall, bold=not by_cpu)
        cells[1] = ratio(a.cpu, b.cpu, _cpu, bold=True)
        updates = a.phases["update"], b.phases["update"]
        cells[3] = ratio(*updates, update_seconds, bold=not by_cpu)
        cells[4] = f"{b.above_weights_mib / a.above_weights_mib:.2f}x"
    elif by_cpu:  # only for two sides that only sample
        cells[1] = ratio(a.cpu, b.cpu, _cpu, bold=True) if _samples(theirs, ours) else "-"
    return cells


def _samples(*results: Record) -> bool:
    return all(result["job"]["kind"] == "sample" for result in results)


def _wall(step: Record) -> float:
    return float(step["seconds"])


def _cpu(step: Record) -> float:
    return float(step["cpu_seconds"])


def _pairs(one: Record, other: Record, seconds: Seconds) -> dict[int, list[float]]:
    """By seed, the ratios of consecutive steps, per completion token."""
    at = {(s["seed"], s["round"], s["run"]): s for s in other["steps"]}
    found: dict[int, list[float]] = {}
    for step in one["steps"]:
        if beside := at.get((step["seed"], step["round"], step["run"])):
            costs = [seconds(s) / sum(s["lengths"]) for s in (step, beside)]
            found.setdefault(step["seed"], []).append(costs[0] / costs[1])
    return found


def _range(one: Record, other: Record, seconds: Seconds) -> str:
    ratios = [ratio for seed in _pairs(one, other, seconds).values() for ratio in seed]
    return f" ({min(ratios):.2f}..{max(ratios):.2f})" if ratios else " (never side by side)"


def _by_seeds(results: Sequence[Record], *, by_cpu: bool) -> list[str]:
    """If there are several seeds, the median ratio of each seed."""
    lines = []
    for result in results[1:]:
        pairs = _pairs(result, results[0], _cpu if by_cpu else _wall)
        if len(pairs) > 1:
            medians = ", ".join(
                f"{statistics.median(ratios):.2f}x ({seed}, {len(ratios)} rounds)"
                for seed, ratios in sorted(pairs.items())
            )
            lines.append(f"- {result['side']} / {results[0]['side']}: {medians}")
    of = "CPU time" if by_cpu else "the whole step"
    return [f"Medians of the ratios of {of}, by seed:\n\n" + "\n".join(lines)] if lines else []
