"""kill -9 at random moments, and at every file operation of a short run."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

from benchmarks.chaos import operations
from benchmarks.chaos.harness import CONFIGS, EMBEDDED, Rig
from benchmarks.chaos.processes import Ended, command, fork
from benchmarks.chaos.results import Trial

FIGURE = "kill -9 at random moments: goes on alone to the identical end"
PROMISED = 600
OPERATIONS_FIGURE = "kill -9 at every file operation of a run, and within every write: the same"
# Runs that are killed at every operation: (configuration, operation of an earlier kill or None).
SESSIONS: tuple[tuple[str, int | None], ...] = (("full", None), ("full", 120), ("keep one", None))
# One in this number of trials uses the real command line, which takes many times as long.
REAL = 30


def moments(rig: Rig, count: int, seed: int) -> list[Trial]:
    """Trials that are killed at random moments of the wall time, every third trial twice."""
    rng = random.Random(seed)
    trials = []
    for number in range(count):
        config = EMBEDDED if number % REAL == REAL - 1 else rng.choice([*CONFIGS])
        shares = [rng.random(), *([] if number % 3 else [rng.random()])]
        name = f"{seed}.{number} {config} at {' and '.join(f'{share:.4f}' for share in shares)}"
        trials.append(Trial(name, config, partial(kill_at_moments, rig, config, shares)))
    return trials


def kill_at_moments(rig: Rig, config: str, shares: list[float]) -> str:
    """Kill a run after these shares of its time, and resume it."""
    seconds = rig.seconds[config]
    for _ in range(20):
        with rig.folder() as folder:
            ended = rig.train(config, folder, kill_after=seconds * shares[0])
            if ended.status < 0:
                for share in shares[1:]:  # the resumed run may have ended by then
                    rig.train(config, folder, kill_after=seconds * share)
                return rig.goes_on(config, folder)
        seconds *= 0.8  # this run was faster than the measured one
    return f"was not hit: status {ended.status}"


def each_operation(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Trials that are killed at a file operation: at every operation, or at `count` random ones."""
    if rig.operations is None:
        return []
    trials = []
    for config, first in (("full", None),) if count else SESSIONS:
        last = count_operations(rig, config, first=first)
        numbers = list(range(1, last + 1))
        if count:
            numbers = sorted(random.Random(seed).sample(numbers, min(count, last)))
        before = f" after {first}" if first else ""
        trials += [
            Trial(
                f"{config}{before} at operation {number}",
                config,
                partial(kill_at_operation, rig, config, number, first),
            )
            for number in numbers
        ]
    return trials


def killed(rig: Rig, config: str, folder: Path, number: int) -> Ended:
    """Kill a run at an operation. A write is killed after its first half."""
    arm = partial(operations.arm, rig.operations, folder / "run", operations.KILL, number)
    ended = rig.train(config, folder, arm)
    if ended.status != -9:
        raise RuntimeError(f"was not hit: status {ended.status}: {ended.output[-300:]}")
    return ended


def kill_at_operation(rig: Rig, config: str, number: int, first: int | None) -> str:
    """Kill a run at an operation, and resume it. If `first` is given, the killed run is itself a
    resumed run that was killed at operation `first`."""
    with rig.folder() as folder:
        for at in (first, number) if first else (number,):
            killed(rig, config, folder, at)
        return rig.goes_on(config, folder)


def count_operations(
    rig: Rig,
    config: str,
    mode: int = operations.KILL,
    *,
    error: int = 0,
    first: int | None = None,
) -> int:
    """The number of operations, of the kinds that `mode` counts, that a run makes in its folder. If
    `first` is given, the run is resumed after a kill at operation `first`."""
    with rig.folder() as folder:
        file = folder / "count"
        if first:
            killed(rig, config, folder, first)

        def action() -> int:
            operations.arm(rig.operations, folder / "run", mode, error=error)
            status = command(rig.arguments(config, folder), None)()
            file.write_text(str(rig.operations.chaos_count()))
            return status

        fork(action, folder / "log")
        return int(file.read_text())
