"""Two processes in one folder: one trains, the other is refused with the owner's process id, and no
files mix."""

from __future__ import annotations

import random
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.harness import Rig
from benchmarks.chaos.processes import DEADLINE, finish, start, to_file, wait
from benchmarks.chaos.results import Trial

FIGURE = "two processes in one folder: one wins, the other is told who holds it"
PROMISED = 100
WAYS: dict[str, dict[str, Any]] = {
    "auto": {"resume_from_checkpoint": "auto"},
    "overwrite": {"resume_from_checkpoint": None, "overwrite_output_dir": True},
    "plain": {"resume_from_checkpoint": None},
}
GOING_ON = r"belongs to a run that is going on \(host \S+ process (\d+) since 2"
OVER = r"is now in .*/earlier/1|has finished: 5 steps"


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Random pairs of ways to start a run. In half of the pairs both start within 20 ms, so that
    they race for the lock."""
    rng = random.Random(seed)
    found = []
    for number in range(count or PROMISED):
        ways = rng.choice([*WAYS]), rng.choice([*WAYS])
        later = rng.random() * (0.02 if number % 2 else 1.0)
        name = f"{seed}.{number} {' and '.join(ways)} after {later:.4f}"
        found.append(Trial(name, "full", partial(race, rig, ways, later)))
    return found


def race(rig: Rig, ways: tuple[str, str], later: float) -> str:
    """Start two runs. `later` is the delay of the second: in seconds below 0.02, else as a share of
    a run's time."""
    with rig.folder() as folder:
        logs = [folder / f"log{number}" for number in range(2)]
        first = begin(rig, folder, ways[0], logs[0])
        time.sleep(later if later < 0.02 else later * rig.seconds["full"])
        second = begin(rig, folder, ways[1], logs[1])
        both = (first, second)
        statuses = [wait(process, DEADLINE) for process in both]
        ended = []
        for process, status, log in zip(both, statuses, logs, strict=True):
            ended.append(finish(process, status, 0.0, log))
        told = []
        for number, way in enumerate(ways):
            said, status = ended[number].output, ended[number].status
            other = both[1 - number]
            if holder := re.search(GOING_ON, said):
                told.append(status == 2 and int(holder[1]) == other)
            elif re.search(OVER, said):
                told.append(status == 0)
            elif status:
                return f"{way} ended with {status}: {said[-400:]}"
        if not all(told):
            return f"is told otherwise: {[e.output[-300:] for e in ended]}"
        if len(told) == 2:
            return f"both are refused: {[e.output[-300:] for e in ended]}"
        if not told and ways[1] != "overwrite":  # its start may follow the first run
            return f"both trained: {[e.output[-200:] for e in ended]}"
        for earlier in folder.rglob("earlier"):  # of a plain start after the first run
            shutil.rmtree(earlier)
        return rig.differences("full", folder)


def begin(rig: Rig, folder: Path, way: str, log: Path) -> int:
    """Start a run in a separate process. Returns the process id."""
    return start(rig.action("full", folder, **WAYS[way]), to_file(log))
