"""The part of signal handling that the collectives use."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

# Signals that request a process to stop. Not every system has all of them.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class Signals(Protocol):
    """The stop signals of a process. `received` is the first signal. `deferred` delays signals in a
    block, and `pass_on` handles a signal that another process received."""

    received: int | None

    @property
    def is_held(self) -> bool:
        """Whether signals are deferred now."""

    def deferred(self) -> AbstractContextManager[None]:
        """Defer signals in this block. A signal that arrived is raised at the end of the block."""

    def pass_on(self, number: int) -> None:
        """Handle a signal that another process has received."""


class IgnoredSignals:
    """Signals before a run starts: no signal is handled."""

    received: int | None = None
    is_held = True

    def deferred(self) -> AbstractContextManager[None]:
        """See `Signals`."""
        return nullcontext()

    def pass_on(self, number: int) -> None:
        """See `Signals`."""
