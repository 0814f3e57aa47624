"""Diagnostics that never end a run: an exception becomes a note, and the run continues."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from rloo.rewards.state_guard import said_by

T = TypeVar("T")
Note = Callable[[str], object]


def attempt(what: str, diagnose: Callable[[], T], otherwise: T, note: Note) -> T:
    """Return the result of `diagnose`. If `diagnose` raises, return `otherwise`, and call `note`
    with a text that names `what` and the error."""
    try:
        return diagnose()
    except Exception as error:  # chat templates, tokenizers and records are the user's
        said = " ".join(said_by(error).split())[:300]
        note(f"the doctor cannot find out {what}: {type(error).__name__}: {said}")
        return otherwise


def warn(text: str) -> None:
    """Issue a note as a Python warning, if there is no run that records notes."""
    warnings.warn(text, stacklevel=2)
