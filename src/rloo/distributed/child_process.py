"""A child process: how a program is started, watched and ended, and how it dies with its parent.

Code that runs inside the sandbox cannot import this; it starts its own
(`process_tree` of its guest side).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

HAS_DEATH_SIGNAL = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02
# Starts the command and ends it when nobody is left who could close the standard input.
_GUARD = (
    'exec 3<&0; "$@" </dev/null & child=$!; '
    "{ cat >/dev/null; kill -TERM $child 2>/dev/null; sleep 8; kill -KILL 0; } <&3 & "
    "wait $child; status=$?; kill -KILL 0; exit $status"
)
# How a child learns that its parent is dead.
#   signal: Linux sends it SIGKILL when the thread that started it ends. Elsewhere as `guard`.
#   guard: a shell between the two ends the program when a pipe from the parent is closed. It needs
#       no code between fork and exec, which would copy the page tables of a large process.
#   lifeline: the program is ours and reads that pipe. Its last argument is the pipe's number.
#   channel: the program ends when `channel` is closed at the other end.
Tie = Literal["signal", "guard", "lifeline", "channel"]


@dataclass(eq=False)
class ChildProcess:
    """A program, started in a session of its own: a terminal's Ctrl-C reaches the parent alone, and
    the process group can be killed as one.

    `environment` replaces this process's own. `log` is a file to which the output is appended; the
    child prints where this process does without one, or nothing to its standard output if `quiet`.
    Its standard input is empty unless it `shares_input`. `channel` is a file that the child gets;
    its number is the command's last argument but for that of a lifeline. Signals in `unblocked` are
    delivered to the child, whatever this thread has blocked. `user` is the user that it becomes.
    Raises OSError where the program cannot be started.
    """

    command: Sequence[str]
    tie: Tie = "signal"
    environment: Mapping[str, str] | None = None
    folder: str | Path | None = None
    log: Path | None = None
    channel: int | None = None
    quiet: bool = False
    shares_input: bool = False
    unblocked: Collection[int] = ()
    user: int | None = None

    def __post_init__(self) -> None:
        self._lifeline: IO[bytes] | None = None
        self._closing = threading.Lock()
        if self.log is None:
            self._process = self._started(None)
        else:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = self._started(log)

    def _started(self, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
        by_signal = self.tie == "signal" and HAS_DEATH_SIGNAL
        guarded = self.tie == "guard" or (self.tie == "signal" and not by_signal)
        command, passed = [*self.command], []
        if guarded:
            command = ["/bin/sh", "-c", _GUARD, "sh", *command]
        if self.channel is not None:
            passed.append(self.channel)
        read = None
        if guarded or self.tie == "lifeline":
            read, write = os.pipe()
            self._lifeline = open(write, "wb", buffering=0)  # noqa: SIM115  # until `end`
            passed += [] if guarded else [read]
        options: dict[str, Any] = {"stdin": None if self.shares_input else subprocess.DEVNULL}
        if guarded:
            options["stdin"] = read
        if self.user is not None:
            options |= {"user": self.user, "group": self.user, "extra_groups": []}
        if by_signal or self.unblocked:
            options["preexec_fn"] = _prepare(self.unblocked, by_signal=by_signal)
        try:
            return subprocess.Popen(
                [*command, *map(str, passed)],
                env=self.environment,
                cwd=self.folder,
                stdout=subprocess.DEVNULL if self.quiet else log,
                stderr=log,
                pass_fds=passed,
                start_new_session=True,
                **options,
            )
        except BaseException:
            self._close_lifeline()
            raise
        finally:
            if read is not None:
                os.close(read)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def poll(self) -> int | None:
        """The status with which it has ended, minus a signal's number; None while it runs."""
        return self._process.poll()

    def join(self) -> int:
        """Its status, once it has ended."""
        return self._process.wait()

    def wait(self, seconds: float) -> int | None:
        """Its status; None if it runs after so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def reap(self) -> int | None:
        """Its status if it has ended. If it failed, what is left of its group is killed before its
        number can be another one's."""
        seen = self._seen_status()
        if seen is None:
            return None
        if seen != 0 and self._process.returncode is None:
            self.kill_group()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, if it runs. For any thread."""
        self._process.kill()

    def kill_group(self) -> None:
        """Kill the process and what it has started, unless that left its group. For any thread."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = 0.0, *, group: bool = False) -> int:
        """Ask it to end, kill it after so many seconds (with its `group`, also where it has ended),
        and return its status. For any thread, also twice."""
        if seconds > 0 and self._process.poll() is None:
            if self._lifeline is None:
                self._process.terminate()
            self._close_lifeline()
            deadline = time.monotonic() + seconds
            while self._seen_status() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        if group:
            self.kill_group()
        self._process.kill()
        status = self._process.wait()
        self._close_lifeline()
        return status

    def _seen_status(self) -> int | None:
        """Its status, or its signal's number, if it has ended; its number stays its own."""
        if self._process.returncode is None:
            with suppress(ChildProcessError):  # another thread waited for it
                how = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return None if how is None else how.si_status
        return self._process.wait()

    def _close_lifeline(self) -> None:
        with self._closing:
            if self._lifeline is not None:
                self._lifeline.close()

    def last_lines(self, count: int) -> str:
        """The end of its log, each line on a line of its own for a message."""
        return "" if self.log is None else last_lines(self.log, count)


def last_lines(log: Path, count: int) -> str:
    """The last lines of a file, each after a line break and indented; empty without any."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-count:])


def describe_status(status: int | None, name: Callable[[int], str] = "signal {}".format) -> str:
    """How a process has ended, in words; `name` names a signal."""
    if status is None:
        return "is gone, or cannot be reached any more"
    return f"was ended by {name(-status)}" if status < 0 else f"ended with status {status}"


def shell_status(status: int) -> int:
    """A status as a shell has it: 128 and the number of a signal."""
    return status if status >= 0 else 128 - status


def _prepare(unblocked: Collection[int], *, by_signal: bool) -> Callable[[], None]:
    """What the child does before it becomes the program. All that it calls is looked up here: after
    a fork the child has none of the other threads, which may hold locks."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if by_signal else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)
        if prctl is not None and os.getppid() != parent:  # it died before
            os._exit(1)

    return prepare
