"""A diagnosis never ends a run: what it raises is told in a note, and the run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from rloo.rewards.state_guard import said_by

T = TypeVar("T")
Note = Callable[[str], object]


def attempt(what: str, diagnose: Callable[[], T], otherwise: T, note: Note) -> T:
    """What `diagnose` returns, or `otherwise` where it raises: then `note` is told that `what`
    cannot be found out, and why."""
    try:
        return diagnose()
    except Exception as error:  # chat templates, tokenizers and records are the user's
        said = " ".join(said_by(error).split())[:300]
        note(f"the doctor cannot find out {what}: {type(error).__name__}: {said}")
        return otherwise


def warn(text: str) -> None:
    """A note where no run is there to take it."""
    warnings.warn(text, stacklevel=2)
