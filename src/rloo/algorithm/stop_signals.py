"""Signals that ask a run to stop: obeyed at once where nothing is half done, else held back."""

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

# Seconds within which a signal of the same kind is the same one.
FOLLOW_UP_SECONDS = 1.0


class Stopped(SystemExit):
    """A signal other than Ctrl-C has ended a run, after it was saved. A script that does not catch
    it exits with 128 + the signal's number, which no scheduler takes for success."""

    def __init__(self, number: int) -> None:
        self.status, self.signal = 128 + number, signal.Signals(number)
        super().__init__(self.status)

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C, which nothing holds back: what is half done must not be saved."""


class StopSignals:
    """Receives the signals that ask to stop while `handling`, in the main thread only, as Python
    allows; a signal that is ignored (nohup, a background job) stays ignored.

    The first one raises KeyboardInterrupt or `Stopped` wherever the run is, unless it is in a part
    that is `deferred`: then at the end of that part. A second one of the same kind ends at once.
    With `usr1_saves`, SIGUSR1 sets `save_wanted` instead."""

    def __init__(self, *, usr1_saves: bool = False) -> None:
        self.save_wanted = False
        self.received: int | None = None  # the first one
        self._seen: dict[int, float] = {}  # when each kind came first
        self.usr1_saves = usr1_saves
        self._held = 0
        self._ends = False

    @contextmanager
    def handling(self) -> Iterator[StopSignals]:
        """Install the handlers; on leaving, put the previous ones back."""
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
        """Hold signals back in this block, and raise at its end what came in it."""
        self.hold()
        try:
            yield
        finally:
            self._held -= 1
        self.check()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A signal in this block ends the process with its status and one line: for imports, where
        nothing is to be saved, and where C++ that calls Python aborts on an exception."""
        self._ends = True
        try:
            yield
        finally:
            self._ends = False

    @property
    def is_held(self) -> bool:
        """Whether signals are held back now."""
        return self._held > 0

    def hold(self) -> None:
        """Hold signals back from now on, to the end of the block that is `released`."""
        self._held += 1

    @contextmanager
    def released(self) -> Iterator[None]:
        """At the end of this block, end every `hold` of it and raise what came since."""
        before = self._held
        try:
            yield
        finally:
            self._held = before
        self.check()

    def check(self) -> None:
        """Raise what was held back, also where user code swallowed it when it was first raised."""
        if self.received is not None and not self._held:
            raise self._error(self.received)

    def pass_on(self, number: int) -> None:
        """Another process of the run was asked to stop by signal `number`: so is this one."""
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
            # Schedulers and launchers may both tell a process of several the same thing.
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
