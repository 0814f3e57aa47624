"""What the library computes beside what torch does, on small inputs, at the start of a run."""

from __future__ import annotations


def difference() -> str | None:
    """What the library computes otherwise than torch, or None: milliseconds."""
    return None
