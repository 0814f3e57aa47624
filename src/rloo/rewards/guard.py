"""What a reward function may not do to the run that calls it, and the error that names it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rloo.rewards.deadline import DeadlinePassed

_HINT = "reward_on_error missing leaves its rewards out"
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_State = tuple[str, Callable[[], Any], Callable[[Any], Any]]


@contextmanager
def blame(name: str, seconds: float | None) -> Iterator[None]:
    """Give what a block raises, in which the reward function `name` runs, its name.

    DeadlinePassed becomes a TimeoutError, and what would end the run as if nothing had happened
    (SystemExit) a RuntimeError. An Exception is passed on with a note, and what comes from outside
    (Ctrl-C) as it is.
    """
    try:
        yield
    except DeadlinePassed as error:
        raise TimeoutError(describe_timeout(name, seconds)) from error
    except Exception as error:  # any error is passed on with the function's name added
        error.add_note(f"raised by the reward function {name!r}")
        raise
    except BaseException as error:
        if _comes_from_outside(error):
            raise
        what = f"exit({error.code!r})" if isinstance(error, SystemExit) else repr(error)
        raise RuntimeError(
            f"the reward function {name!r} raised {what}, which would end the run; a reward "
            f"returns, or raises an Exception ({_HINT})"
        ) from error


@contextmanager
def keep_state(names: str) -> Iterator[None]:
    """Restore what a block changes of the state of the process, and raise RuntimeError for it;
    os._exit raises SystemExit while it runs."""
    exit_now, process = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:  # a child that was forked meanwhile
            exit_now(status)
        raise SystemExit(status)

    os._exit = refuse  # type: ignore[assignment]
    states = [(what, read(), read, restore) for what, read, restore in _list_states()]
    changed = []
    try:
        yield
    finally:
        os._exit = exit_now
        for what, before, read, restore in states:
            after = read()
            if before is not None and after != before:
                changed.append(f"{what} from {before} to {after}")
                restore(before)
    if changed:
        raise RuntimeError(
            f"the reward function {names} changed {' and '.join(changed)}; the state of the "
            f"process belongs to the run: restore it, or set it when the file is loaded ({_HINT})"
        )


def describe_timeout(name: str, seconds: float | None) -> str:
    """The message about a reward function that did not return in time."""
    return (
        f"the reward function {name!r} did not return within {seconds:g} s; a call of a reward "
        f"function needs to end within the deadline (reward_timeout; {_HINT})"
    )


def _comes_from_outside(error: BaseException) -> bool:
    # Ctrl-C, what the run's own signal handlers raise, and the end of a coroutine.
    outside = (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit)
    return isinstance(error, outside) or type(error).__module__.startswith("rloo.")


def _list_states() -> list[_State]:
    """What is the same before and after a call: its name, how it is read and how it is restored."""
    states: list[_State] = [("the working directory", _read_folder, os.chdir)]
    if threading.current_thread() is threading.main_thread():
        for name in _SIGNALS:
            number = getattr(signal, name, None)
            if number is not None:
                states.append((f"the handler of {name}", *_handler_of(number)))
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "set_num_threads"):  # whole, not just being imported
        states += [
            ("torch's gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
            ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
            ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
        ]
    return states


def _handler_of(number: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: signal.getsignal(number), lambda handler: signal.signal(number, handler)


def _read_folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return None
