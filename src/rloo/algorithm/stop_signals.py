"""Signals that stop a run: handled at once, or deferred until the current operation is complete."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rloo.config.launcher_env import is_launched
from rloo.distributed.signal_numbers import STOP_SIGNALS

# Under a launcher, a signal that is repeated within this time is ignored.
FOLLOW_UP_SECONDS = 1.0


class Stopped(SystemExit):
    """Raised after a signal other than Ctrl-C stopped a run and the run was saved. A script that
    does not catch it exits with status 128 + the signal's number, which schedulers count as a
    failure."""

    def __init__(self, number: int) -> None:
        self.status: int = 128 + number
        self.signal: signal.Signals = signal.Signals(number)
        super().__init__(self.status)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class ForcedInterrupt(KeyboardInterrupt):
    """Raised for a second Ctrl-C, which is never deferred. Incomplete state must not be saved."""


class StopSignals:
    """Handles stop signals inside a `handling` block. Python allows this in the main thread only. A
    signal that is ignored (nohup, a background job) stays ignored.

    The first signal raises KeyboardInterrupt or `Stopped`: inside a `deferred` block at the end of
    that block, elsewhere at once. A second signal of the same kind ends the run at once. With
    `usr1_saves`, SIGUSR1 sets `save_wanted` instead."""

    def __init__(self, *, usr1_saves: bool = False) -> None:
        self.save_wanted: bool = False
        self.received: int | None = None  # the first signal
        self._seen: dict[int, float] = {}  # time of the first signal of each kind
        self.usr1_saves = usr1_saves
        self._held = 0
        self._ends = False

    @contextmanager
    def handling(self) -> Iterator[StopSignals]:
        """Install the handlers; on exit, restore the previous ones."""
        previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
            for number in numbers:
                if signal.getsignal(number) != signal.SIG_IGN:
                    previous[number] = signal.signal(number, self._receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals in this block. At the end of the block, raise if a signal arrived."""
        self.hold()
        try:
            yield
        finally:
            self._held -= 1
        self.check()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """In this block, a signal ends the process with the signal's status and a one-line message.
        Use the block for imports: there is nothing to save, and C++ code that calls Python aborts
        on an exception."""
        self._ends = True
        try:
            yield
        finally:
            self._ends = False

    @property
    def is_held(self) -> bool:
        """Whether signals are deferred now."""
        return self._held > 0

    def hold(self) -> None:
        """Defer signals from now on, to the end of the enclosing `released` block."""
        self._held += 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """At the end of this block, undo every `hold` inside the block, and raise if a signal
        arrived."""
        before = self._held
        try:
            yield
        finally:
            self._held = before
        self.check()

    def check(self) -> None:
        """Raise the exception of a deferred signal, or of a signal whose exception user code
        swallowed."""
        if self.received is not None and not self._held:
            raise self._error(self.received)

    def pass_on(self, number: int) -> None:
        """Handle signal `number`, which another process of the run received, as if this process had
        received it."""
        if self.received is None:
            self._receive(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.usr1_saves and number == signal.SIGUSR1:
            self.save_wanted = True
        elif self._ends:
            said = str(self._error(number)) or "interrupted"
            os.write(sys.stderr.fileno(), f"rloo: {said}\n".encode())
            os._exit(128 + number)
        elif number in self._seen:
            # A scheduler and a launcher may both send the same signal to a rank.
            if not is_launched() or time.monotonic() - self._seen[number] > FOLLOW_UP_SECONDS:
                self._end_now(number)
        else:
            self._seen[number] = time.monotonic()
            self.received = self.received or number
            self.check()

    def _end_now(self, number: int) -> None:
        if number == signal.SIGINT:
            raise ForcedInterrupt
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live display has hidden the cursor
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    @staticmethod
    def _error(number: int) -> BaseException:
        return KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)
