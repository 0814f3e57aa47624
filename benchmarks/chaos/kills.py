"""kill -9 at random moments, and at every file operation of a short run."""

from __future__ import annotations

import random
from functools import partial

from benchmarks.chaos import operations
from benchmarks.chaos.results import Trial
from benchmarks.chaos.rig import CONFIGS, EMBEDDED, Rig, command

FIGURE = "kill -9 at random moments: goes on alone to the identical end"
PROMISED = 600
OPERATIONS_FIGURE = "kill -9 at every file operation of a run, and within every write: the same"
# One in so many goes through the real command line, which takes many times as long.
REAL = 30


def moments(rig: Rig, count: int, seed: int) -> list[Trial]:
    """Trials that are killed at a random moment of their wall time."""
    rng = random.Random(seed)
    trials = []
    for number in range(count):
        config = EMBEDDED if number % REAL == REAL - 1 else rng.choice([*CONFIGS])
        share = rng.random()
        name = f"{seed}.{number} {config} at {share:.4f}"
        trials.append(Trial(name, config, partial(kill_at_moment, rig, config, share)))
    return trials


def kill_at_moment(rig: Rig, config: str, share: float) -> str:
    """Kill a run after a share of its time, and go on."""
    seconds = rig.seconds[config] * share
    for _ in range(20):
        with rig.folder() as folder:
            ended = rig.train(config, folder, kill_after=seconds)
            if ended.status < 0:
                return rig.goes_on(config, folder)
        seconds *= 0.8  # it was faster than the one that was measured
    return f"was not hit: status {ended.status}"


def each_operation(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Trials that are killed at a file operation: at every one, or at `count` of them."""
    if rig.operations is None:
        return []
    trials = []
    for config in ("full",) if count else ("full", "keep one"):
        numbers = list(range(1, count_operations(rig, config) + 1))
        if count:
            numbers = sorted(random.Random(seed).sample(numbers, min(count, len(numbers))))
        trials += [
            Trial(f"{config} at operation {n}", config, partial(kill_at_operation, rig, config, n))
            for n in numbers
        ]
    return trials


def count_operations(rig: Rig, config: str, mode: int = operations.KILL, error: int = 0) -> int:
    """How many operations a run makes in its folder, of those that a mode counts."""
    with rig.folder() as folder:
        file = folder / "count"

        def action() -> int:
            operations.arm(rig.operations, folder / "run", mode, error=error)
            status = command(rig.arguments(config, folder), None)()
            file.write_text(str(rig.operations.chaos_count()))
            return status

        rig.fork(action, folder / "log")
        return int(file.read_text())


def kill_at_operation(rig: Rig, config: str, number: int) -> str:
    """Kill a run at an operation, of a write after its first half, and go on."""
    with rig.folder() as folder:
        kill = partial(operations.arm, rig.operations, folder / "run", operations.KILL, number)
        ended = rig.train(config, folder, kill)
        if ended.status != -9:
            return f"was not hit: status {ended.status}: {ended.output[-300:]}"
        return rig.goes_on(config, folder)
