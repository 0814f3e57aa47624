"""Delaying Ctrl-C while something must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C, which does interrupt: the half-finished state must not be saved."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block is finished; a second Ctrl-C raises ForcedInterrupt."""
    pending: list[Any] = []

    def hold_back(*_: Any) -> None:
        if pending:
            raise ForcedInterrupt
        pending.append(True)

    # Only the main thread receives signals, and a background job may ignore SIGINT.
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        raise KeyboardInterrupt
