"""Disk errors at every file operation of a run: no space, I/O error, read-only, no permission.

The run must end with an error message, or continue. No row may be lost, no checkpoint damaged. Once
the disk works again, the same command must reach the end of an undisturbed run.
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
# Errors from an operation on, or only at this operation. Reads are included.
KINDS = {
    "no space from": (errno.ENOSPC, operations.FAIL_ON),
    "no space at": (errno.ENOSPC, operations.FAIL),
    "I/O error at": (errno.EIO, operations.FAIL),
    "read-only from": (errno.EROFS, operations.FAIL_ON),
    "no permission at": (errno.EACCES, operations.FAIL),
}

# Kinds that are also tested on a run that resumes after a kill at an operation.
GOING_ON = ("no space from", "I/O error at")
KILLED = 120


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """All kinds at all operations, or `count` random ones with alternating kinds."""
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
    """Let an operation of a run fail (with `first`, of a resumed run), check the files, and
    resume."""
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
