"""Signals that ask a run to stop, as far as the lines between processes must know of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

# With these a process is asked to stop; not all systems have all.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


class Signals(Protocol):
    """Those that ask to stop. `received` is the first one, which `held` holds back in a block, and
    `pass_on` takes from another process."""

    received: int | None

    @property
    def is_held(self) -> bool:
        """Whether they are held back."""

    def deferred(self) -> AbstractContextManager[None]:
        """Hold them back in this block; what came in it is raised at its end."""

    def pass_on(self, number: int) -> None:
        """Another process has received one."""


class IgnoredSignals:
    """Signals before a run, which nobody listens to."""

    received: int | None = None
    is_held = True

    def deferred(self) -> AbstractContextManager[None]:
        """See `Signals`."""
        return nullcontext()

    def pass_on(self, number: int) -> None:
        """See `Signals`."""
