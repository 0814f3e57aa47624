"""Properties of the system that not every operating system reports."""

from __future__ import annotations

import os


def num_processors() -> int:
    """The number of processors that this process may use. If the system does not report this number
    (macOS), the number of processors of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
