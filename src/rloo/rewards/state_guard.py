"""Guards against reward functions that change or end the run, with errors that name the
function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rloo.config.user_functions import NotAllowed, noting_signals
from rloo.rewards.process_state import inference_mode_kept, list_states
from rloo.rewards.timeout import RewardTimeout

_HINT = "reward_on_error missing leaves its rewards out"


@contextmanager
def blame(name: str, seconds: float | None) -> Iterator[None]:
    """Name the reward function `name` in exceptions of a block that calls it.

    RewardTimeout becomes a TimeoutError. SystemExit and KeyboardInterrupt, which would end the run
    without an error, become NotAllowed. An Exception is passed on with a note. The exception of a
    signal (Ctrl-C) is passed on unchanged.
    """
    with noting_signals() as came:
        try:
            yield
        except RewardTimeout as error:
            raise TimeoutError(describe_timeout(name, seconds)) from error
        except Exception as error:  # any error is passed on with the function's name added
            error.add_note(f"raised by the reward function {name!r}")
            raise
        except BaseException as error:
            if came:
                raise
            what = f"exit({show(error.code)})" if isinstance(error, SystemExit) else show(error)
            raise NotAllowed(
                f"the reward function {name!r} raised {what}, which would end the run; a reward "
                f"returns, or raises an Exception ({_HINT})"
            ) from error


@contextmanager
def keep_state(names: str) -> Iterator[None]:
    """At the end of this block, restore each part of the process's state that the block changed. If
    the block changed any part, raise NotAllowed, which names the reward functions `names`. In the
    block, os._exit raises SystemExit."""
    exit_now, process = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:  # a child process forked in this block
            exit_now(status)
        raise SystemExit(status)

    os._exit = refuse  # type: ignore[assignment]
    changed: list[str] = []
    with inference_mode_kept():
        states = [(what, read(), read, restore) for what, read, restore in list_states()]
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
        raise NotAllowed(
            f"the reward function {names} changed {' and '.join(changed)}; the state of the "
            f"process belongs to the run: restore it, or set it when the file is loaded ({_HINT})"
        )


def describe_timeout(name: str, seconds: float | None) -> str:
    """Return the error message for a reward function that missed its deadline."""
    return (
        f"the reward function {name!r} did not return within {seconds:g} s; a call of a reward "
        f"function needs to end within the deadline (reward_timeout; {_HINT})"
    )


def said_by(error: BaseException) -> str:
    """Return the text of an error, or its repr if `str` fails."""
    try:
        return str(error)
    except Exception:  # a user's own __str__ may raise anything
        return show(error)


def show(value: Any, limit: int = 100) -> str:
    """Return the repr of `value` in one line of about `limit` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's own __repr__ may raise anything
        text = object.__repr__(value)
    return f"{text[:limit]}..." if len(text) > limit else text
