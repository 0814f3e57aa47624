"""Ctrl-C, held back while something must not be broken off. Knows nothing of what that is."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ForcedInterrupt(KeyboardInterrupt):
    """A second Ctrl-C, in the middle of something: nothing that is half done may be saved."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done; a second one goes through."""
    pending: list[Any] = []

    def hold_back(*_: Any) -> None:
        if pending:
            raise ForcedInterrupt
        pending.append(True)

    # Only the main thread receives signals, and a background job may ignore this one.
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
