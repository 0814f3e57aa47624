"""What a process finds on its system, which not every one tells."""

from __future__ import annotations

import os


def num_processors() -> int:
    """How many processors this process may use; where the system does not say so, as on macOS, how
    many the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
