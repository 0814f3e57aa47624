"""Child processes: start, monitor and stop a program, and stop it when its parent dies.

Code inside the sandbox cannot import this module. Such code uses `process_tree`, a separate
implementation.
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
# A shell that starts the command, and stops the command when no process can write to the shell's
# stdin.
_GUARD = (
    'exec 3<&0; "$@" </dev/null & child=$!; '
    "{ cat >/dev/null; kill -TERM $child 2>/dev/null; sleep 8; kill -KILL 0; } <&3 & "
    "wait $child; status=$?; kill -KILL 0; exit $status"
)
# How a child detects that its parent is dead.
#   signal: Linux sends SIGKILL when the thread that started the child ends. Other systems use
#       `guard`.
#   guard: a shell between parent and program stops the program when a pipe from the parent is
#       closed. No code runs between fork and exec; such code would copy the page tables of a large
#       process.
#   lifeline: a program of this package reads the pipe. Its last argument is the pipe's number.
#   channel: the program ends when `channel` is closed at the other end.
Tie = Literal["signal", "guard", "lifeline", "channel"]


@dataclass(eq=False)
class ChildProcess:
    """A program in a new session: a terminal's Ctrl-C reaches only the parent, and the process
    group can be killed as one.

    `environment` replaces this process's environment. Output is appended to the file `log`, or goes
    to this process's streams. `quiet` discards standard output. Standard input is empty unless
    `shares_input`. The child inherits the descriptor `channel`, and its number is added to the
    command as an argument. With `tie="lifeline"`, the number of a second descriptor follows.
    Signals in `unblocked` are delivered to the child even if this thread blocks them. The child
    runs as `user`. Raises OSError if the program cannot be started.
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
        """The process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.poll()

    def join(self) -> int:
        """Wait for the end of the process and return its exit status."""
        return self._process.wait()

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the process and return its exit status, or None if it still runs
        after `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def reap(self) -> int | None:
        """The exit status if the process has ended, otherwise None. If the process failed, the rest
        of its group is killed first, before the pid can be reused."""
        seen = self._seen_status()
        if seen is None:
            return None
        if seen != 0 and self._process.returncode is None:
            self.kill_group()
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, if it runs. Thread-safe."""
        self._process.kill()

    def kill_group(self) -> None:
        """Kill the process and all children that are still in its group. Thread-safe."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, seconds: float = 0.0, *, group: bool = False) -> int:
        """Terminate the process, kill it after `seconds`, and return its exit status. With `group`
        the process group is killed too, even if the process has ended. Thread-safe, and may be
        repeated."""
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
        """The exit status, or the signal's number, if the process has ended. The pid stays
        reserved."""
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
        """The last lines of the log, indented for a message."""
        return "" if self.log is None else last_lines(self.log, count)


def last_lines(log: Path, count: int) -> str:
    """The last lines of a file, each after a line break and indented. Empty if the file has
    none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in lines[-count:])


def describe_status(status: int | None, name: Callable[[int], str] = "signal {}".format) -> str:
    """A phrase that describes how a process has ended. `name` returns the name of a signal."""
    if status is None:
        return "is gone, or cannot be reached any more"
    return f"was ended by {name(-status)}" if status < 0 else f"ended with status {status}"


def shell_status(status: int) -> int:
    """An exit status as a shell reports it; for a signal, 128 plus its number."""
    return status if status >= 0 else 128 - status


def _prepare(unblocked: Collection[int], *, by_signal: bool) -> Callable[[], None]:
    """Return the function that the child calls between fork and exec. Its library functions are
    looked up before the fork: a lock that another thread holds at the fork is never released in the
    child."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if by_signal else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, unblocked)
        if prctl is not None and os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return prepare
