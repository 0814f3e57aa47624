"""Processes of trials: starts each in a new session, waits for it, and kills it with all
descendants."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Seconds within which the descendants of an ended process must end.
ENDING = 15.0
DEADLINE = 300.0  # seconds; a trial takes about one
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Ended:
    """The end of a trial's process: its exit status, or minus the number of the signal that killed
    it."""

    status: int
    output: str
    seconds: float


def fork(action: Callable[[], int], log: Path, *, kill_after: float | None = None) -> Ended:
    """Run `action` in a new process and session, with output in `log`. With `kill_after`, the
    process is killed after this number of seconds. Raises RuntimeError for a remaining descendant,
    or for a run that exceeds its deadline."""
    began = time.monotonic()
    process = start(action, to_file(log))
    status = wait(process, DEADLINE if kill_after is None else kill_after)
    return finish(process, status, time.monotonic() - began, log, meant=kill_after is not None)


def to_file(log: Path) -> Callable[[], int]:
    """A function that opens `log` for the output of a process, for `start`."""
    return lambda: os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


def start(action: Callable[[], int], open_output: Callable[[], int]) -> int:
    """Start `action` in a new process, which calls `open_output` for the descriptor of its output.
    Returns the process id. This process adopts its orphans."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _run(action, open_output)
    return process


def command(arguments: list[str], prepare: Callable[[], Any] | None) -> Callable[[], int]:
    """The `rloo` command as an action for `fork`, in the forked process."""

    def action() -> int:
        if prepare is not None:
            prepare()
        return importlib.import_module("rloo.cli").main(arguments)

    return action


def program(arguments: list[str], prepare: object) -> Callable[[], int]:
    """The `rloo` command as an action for `fork`, executed as a new program."""
    given = [sys.executable, "-m", "rloo.cli", *arguments]
    return lambda: os.execv(given[0], given)


def with_workers(arguments: list[str], run: Path) -> Callable[[], int]:
    """The `rloo` command as a new program, with two workers that are started again after they
    die."""
    rloo = f"{shlex.quote(sys.executable)} -m rloo"
    loop = f"(until {rloo} worker $kind {shlex.quote(str(run))}; do sleep 0.1; done)"
    script = f'for kind in sample score; do {loop} & done; exec {rloo} "$@"'
    return lambda: os.execv("/bin/sh", ["/bin/sh", "-c", script, "sh", *arguments])


def finish(
    process: int, status: int | None, seconds: float, log: Path, *, meant: bool = False
) -> Ended:
    """Kill the remaining descendants of a trial's process. With status None, kill its process group
    too, which is an error (a missed deadline) unless `meant`. Raises RuntimeError as `fork`
    does."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if status is None:
            os.kill(process, signal.SIGKILL)  # it may not have its process group yet
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    left, until = children(), time.monotonic() + ENDING
    while left and time.monotonic() < until:  # they end when they notice its end
        time.sleep(0.01)
        left = children()
    said = [_command_of(other) for other in left]
    for other in left:
        os.kill(other, signal.SIGKILL)
    text = log.read_text(errors="replace") if log.exists() else ""
    if status is None and not meant:
        raise RuntimeError(f"not over after {seconds:.0f} s: {text[-400:]}")
    if left:
        raise RuntimeError(f"{len(left)} processes are left: {'; '.join(said)}")
    return Ended(-signal.SIGKILL if status is None else status, text, seconds)


def _command_of(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[-200:]
    return ""


def _run(action: Callable[[], int], open_output: Callable[[], int]) -> None:
    """Execute `action` in a new session of the forked process, and exit with its status."""
    status = 99
    try:
        as_from_a_shell()
        os.setsid()
        output = open_output()
        for stream in (1, 2):
            os.dup2(output, stream)
        status = action()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def as_from_a_shell() -> None:
    """Handle signals as a program does at its start, also below `nohup` or in the background."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait(process: int, deadline: float) -> int | None:
    """A child's exit status, or minus the number of the signal that killed it; None if it is still
    running at the deadline."""
    descriptor = os.pidfd_open(process)
    try:
        ready, _, _ = select.select([descriptor], [], [], deadline)
    finally:
        os.close(descriptor)
    if not ready:
        return None
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def children() -> list[int]:
    """The living children of this process, which adopts orphans. Ended children are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return children_of(os.getpid())


def children_of(process: int) -> list[int]:
    """The children of a process that are not reaped, oldest first; none if the process has
    ended."""
    try:
        found = Path(f"/proc/{process}/task/{process}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(number) for number in found.split()]
