"""A call with a deadline that the function cannot evade.

If the caller is in the main thread, the function runs in the main thread, for two reasons.
Libraries such as math-verify use SIGALRM for their deadlines, which works only in the main thread.
A thread that hangs cannot be ended. SIGALRM is left to these libraries: this module uses SIGURG, a
signal that is ignored by default. At the deadline a waiting thread sends SIGURG, which also
interrupts a sleep, a lock or a read from a socket. If the function ignores the signal (a C call,
`except BaseException` in a loop), faulthandler ends the process up to 5 s later: it writes the
traceback, and the exit status is 1. The thread of faulthandler needs no interpreter lock. The timer
of faulthandler is set again at the deadline, since a function may have cancelled it.
"""

from __future__ import annotations

import contextvars
import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

GRACE_SECONDS = 5.0
_REPEAT_SECONDS = 0.5
_SIGNAL = getattr(signal, "SIGURG", None)  # None on Windows


class RewardTimeout(BaseException):
    """Raised inside a function that takes too long. The base class is BaseException, since
    functions catch Exception."""


def call_with_timeout(seconds: float | None, function: Callable[[], Any]) -> Any:
    """Return `function()`. Raises RewardTimeout if the call took longer than `seconds` (None or 0:
    no limit), even if the call finally returned or raised another error."""
    if not seconds:
        return function()
    in_main_thread = threading.current_thread() is threading.main_thread()
    call = _call_here if in_main_thread and _SIGNAL is not None else call_in_a_thread
    with process_ends_after(seconds):
        return call(seconds, function)


@contextmanager
def process_ends_after(seconds: float | None) -> Iterator[None]:
    """Print the traceback of every thread and end the process if the block does not end within
    `seconds` and a grace period of at most 5 s (None or 0: never)."""
    if not seconds:
        yield
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(_stderr())  # a crash in C prints a traceback too
    _end_process_in(seconds + _grace(seconds))
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _stderr() -> Any:
    """The stream for tracebacks: file descriptor 2 if the stream object is missing or closed."""
    stream = sys.__stderr__
    return 2 if stream is None or stream.closed else stream


def _grace(seconds: float) -> float:
    return min(GRACE_SECONDS, 1.0 + seconds)


def _end_process_in(seconds: float) -> None:
    # A process has one such timer: this replaces an earlier one.
    faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr())


def _call_here(seconds: float, function: Callable[[], Any]) -> Any:
    assert _SIGNAL is not None
    passed, done = threading.Event(), threading.Event()

    def watch() -> None:
        wait, end = seconds, time.monotonic() + seconds + _grace(seconds)
        while not done.wait(wait):
            passed.set()
            # The function may have used or cancelled the timer of faulthandler.
            _end_process_in(max(end - time.monotonic(), _REPEAT_SECONDS / 2))
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            wait = _REPEAT_SECONDS

    def interrupt(*_: Any) -> None:
        if not done.is_set():
            raise RewardTimeout

    previous = signal.signal(_SIGNAL, interrupt)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            result = function()
        finally:
            done.set()
    except Exception as error:
        if passed.is_set():
            raise RewardTimeout from error
        raise
    finally:
        done.set()  # the signal may have arrived just before the first `done.set`
        watcher.join()
        signal.signal(_SIGNAL, previous)
    if passed.is_set():
        raise RewardTimeout
    return result


def call_in_a_thread(seconds: float, function: Callable[[], Any]) -> Any:
    """Call the function in a daemon thread, which gets no signals. Raises RewardTimeout at the
    deadline; a late function continues."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:  # the caller's thread raises it
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RewardTimeout
    return results[0]
