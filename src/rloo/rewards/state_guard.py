"""What a reward function may not do to the run that calls it, and the error that names it."""

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
    """Give what a block raises, in which the reward function `name` runs, its name.

    RewardTimeout becomes a TimeoutError, and what would end the run as if nothing had happened
    (SystemExit, KeyboardInterrupt) is NotAllowed. An Exception is passed on with a note, and what a
    signal raises (Ctrl-C) as it is.
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
    """Restore what a block changes of the state of the process, and raise NotAllowed for it;
    os._exit raises SystemExit while it runs."""
    exit_now, process = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:  # a child that was forked meanwhile
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
    """The message about a reward function that did not return in time."""
    return (
        f"the reward function {name!r} did not return within {seconds:g} s; a call of a reward "
        f"function needs to end within the deadline (reward_timeout; {_HINT})"
    )


def said_by(error: BaseException) -> str:
    """The text of an error; how it is shown where it has none."""
    try:
        return str(error)
    except Exception:  # a user's own __str__ may raise anything
        return show(error)


def show(value: Any, limit: int = 100) -> str:
    """`value` as Python shows it, in one line of about `limit` characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's own __repr__ may raise anything
        text = object.__repr__(value)
    return f"{text[:limit]}..." if len(text) > limit else text
