"""Stop signals, as far as the collectives need to know them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

# Signals that ask a process to stop. Not every system has all of them.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class Signals(Protocol):
    """The stop signals of a process. `received` is the first one; `deferred` delays it in a block,
    and `pass_on` takes one from another process."""

    received: int | None

    @property
    def is_held(self) -> bool:
        """Whether signals are deferred now."""

    def deferred(self) -> AbstractContextManager[None]:
        """Defer signals in this block; one that arrived is raised at its end."""

    def pass_on(self, number: int) -> None:
        """Handle a signal that another process has received."""


class IgnoredSignals:
    """The signals before a run: none is handled."""

    received: int | None = None
    is_held = True

    def deferred(self) -> AbstractContextManager[None]:
        """See `Signals`."""
        return nullcontext()

    def pass_on(self, number: int) -> None:
        """See `Signals`."""
