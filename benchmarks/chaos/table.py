"""The parts that consist of trials: their figures, promised counts, and trials."""

from __future__ import annotations

from benchmarks.chaos import asynchronous, faults, kills, lock, nonfinite, power, ranks, signals
from benchmarks.chaos.harness import Rig
from benchmarks.chaos.results import Trial


def plan(part: str, rig: Rig, count: int | None, seed: int) -> tuple[str, str, list[Trial]]:
    """(figure, promised count, trials) of a part."""
    if part == "kills":
        return kills.FIGURE, "all", kills.moments(rig, count or kills.PROMISED, seed)
    if part == "operations":
        return kills.OPERATIONS_FIGURE, "all", kills.each_operation(rig, count, seed)
    own = (asynchronous, faults, nonfinite, lock, power, ranks, signals)
    modules = {module.__name__.split(".")[-1]: module for module in own}
    return modules[part].FIGURE, "all", modules[part].trials(rig, count, seed)
