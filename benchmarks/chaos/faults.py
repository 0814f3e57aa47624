"""Disks that are full, broken, read-only or closed, at every file operation of a run.

The run ends with an error of a type that says so, or goes on; no row is lost, no checkpoint is
damaged, and once the disk is well it goes on alone to the identical end.
"""

from __future__ import annotations

import errno
import random
from functools import partial

from benchmarks.chaos import operations
from benchmarks.chaos.harness import Rig
from benchmarks.chaos.kills import count_operations, killed
from benchmarks.chaos.results import Trial
from rloo.trainer.checkpoint import list_checkpoints, verify_checkpoint

FIGURE = "no space, I/O error, read-only, no permission at every file operation: nothing is lost"
# From some operation on, or at one alone, reading included.
KINDS = {
    "no space from": (errno.ENOSPC, operations.FAIL_ON),
    "no space at": (errno.ENOSPC, operations.FAIL),
    "I/O error at": (errno.EIO, operations.FAIL),
    "read-only from": (errno.EROFS, operations.FAIL_ON),
    "no permission at": (errno.EACCES, operations.FAIL),
}

# These also for a run that goes on after a kill at an operation.
GOING_ON = ("no space from", "I/O error at")
KILLED = 120


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Every kind at every operation, or `count` of all, of kinds in turn."""
    if rig.operations is None:
        return []
    chosen = [(kind, None) for kind in KINDS] + [(kind, KILLED) for kind in GOING_ON]
    if count is not None:
        chosen = (chosen * 2)[seed % len(chosen) :][: min(count, len(chosen))]
    found = []
    for kind, first in chosen:
        error, mode = KINDS[kind]
        last = count_operations(rig, "full", mode, error=error, first=first)
        before = "going on, " if first else ""
        found.append(
            [
                Trial(f"{before}{kind} {at}", "full", partial(fail, rig, kind, at, first))
                for at in range(1, last + 1)
            ]
        )
    if count is None:
        return [trial for of_kind in found for trial in of_kind]
    rng = random.Random(seed)
    return [rng.choice(found[number % len(found)]) for number in range(count)]


def fail(rig: Rig, kind: str, at: int, first: int | None) -> str:
    """Let an operation fail, perhaps of a run that goes on; look at what is left; go on."""
    error, mode = KINDS[kind]
    with rig.folder() as folder:
        if first:
            killed(rig, "full", folder, first)
        arm = partial(operations.arm, rig.operations, folder / "run", mode, at, error=error)
        ended = rig.train("full", folder, arm)
        if ended.status not in (0, 1, 2) or "Traceback" in ended.output:
            return f"status {ended.status}: {ended.output[-500:]}"
        for _, path in list_checkpoints(folder / "run"):
            verify_checkpoint(path)
        if ended.status and "rloo: " not in ended.output:
            return f"status {ended.status} without a word: {ended.output[-300:]}"
        return rig.goes_on("full", folder)
