"""The growth of the cost along a family of workloads, and the growth that the floor predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.summary import Record, Spread, floors, summarise

_HEAD = (
    "",
    "side",
    "rounds",
    "µs per {unit}",
    "CPU µs per {unit}",
    "sampling",
    "update",
    "over the first",
    "floor over its first",
    "measured / floor",
)


def render_growth(
    name: str, results: Sequence[Record], machine: Mapping[str, Any], *, by_cpu: bool = False
) -> str:
    """A table with a row for each member and side, in order. Growth is of wall-clock time, or of
    CPU time if the machine was not idle."""
    by_groups = name == "K"
    unit = "completion" if by_groups else "token"
    head = [cell.format(unit=unit) for cell in _HEAD]
    if by_cpu:
        head[-3] += " (CPU time)"
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    firsts: dict[str, tuple[float, float]] = {}
    for result in results:
        summary = summarise(result, machine)
        units = summary.tokens if by_groups else 1.0
        floor = _floor_per_token(result, machine) * units
        cost = (summary.cpu if by_cpu else summary.whole).median * units
        first_cost, first_floor = firsts.setdefault(result["side"], (cost, floor))
        grown, predicted = cost / first_cost, floor / first_floor
        cells = [
            result["job"]["title"],
            result["side"],
            str(len(result["steps"])),
            *(_scaled(spread, units).show(".0f") for spread in (summary.whole, summary.cpu)),
            *(
                f"{summary.phases[p].median * units:.0f}" if p in summary.phases else "-"
                for p in ("sample", "update")
            ),
            f"{grown:.2f}x",
            f"{predicted:.2f}x",
            f"**{grown / predicted:.2f}x**",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _scaled(spread: Spread, units: float) -> Spread:
    return Spread(spread.median * units, spread.low * units, spread.high * units)


def _floor_per_token(result: Record, machine: Mapping[str, Any]) -> float:
    """Seconds per completion token: operations at the matrix rate, plus cache reads at the
    bandwidth."""
    found = floors(result)
    operations = sum(floor.operations + floor.prompt_passes for floor in found)
    read = sum(floor.cache_bytes for floor in found)
    tokens = sum(sum(step["lengths"]) for step in result["steps"])
    return (operations / machine["matrix_rate"] + read / machine["bandwidth"]) / tokens
