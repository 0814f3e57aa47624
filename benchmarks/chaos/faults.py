"""Disks that are full, broken, read-only or closed, at every file operation of a run.

The run ends with an error of a type that says so, or goes on; no row is lost, no checkpoint is
damaged, and once the disk is well it goes on alone to the identical end.
"""

from __future__ import annotations

import errno
import random
from functools import partial

from benchmarks.chaos import operations
from benchmarks.chaos.kills import count_operations
from benchmarks.chaos.results import Trial
from benchmarks.chaos.rig import Rig
from rloo.run.checkpoint import list_checkpoints, verify_checkpoint

FIGURE = "no space, I/O error, read-only, no permission at every file operation: nothing is lost"
# From some operation on, or at one alone, reading included.
KINDS = {
    "no space from": (errno.ENOSPC, operations.FAIL_ON),
    "no space at": (errno.ENOSPC, operations.FAIL),
    "I/O error at": (errno.EIO, operations.FAIL),
    "read-only from": (errno.EROFS, operations.FAIL_ON),
    "no permission at": (errno.EACCES, operations.FAIL),
}


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Every kind at every operation, or `count` of all."""
    if rig.operations is None:
        return []
    found = [
        Trial(f"{kind} {at}", "full", partial(fail, rig, kind, at))
        for kind, (error, mode) in KINDS.items()
        for at in range(1, count_operations(rig, "full", mode, error) + 1)
    ]
    return random.Random(seed).sample(found, count) if count else found


def fail(rig: Rig, kind: str, at: int) -> str:
    """Let an operation fail; look at what is left; go on."""
    error, mode = KINDS[kind]
    with rig.folder() as folder:
        arm = partial(operations.arm, rig.operations, folder / "run", mode, at, error=error)
        ended = rig.train("full", folder, arm)
        if ended.status not in (0, 1, 2) or "Traceback" in ended.output:
            return f"status {ended.status}: {ended.output[-500:]}"
        for _, path in list_checkpoints(folder / "run"):
            verify_checkpoint(path)
        if ended.status and "rloo: " not in ended.output:
            return f"status {ended.status} without a word: {ended.output[-300:]}"
        return rig.goes_on("full", folder)
