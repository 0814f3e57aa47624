"""The sandbox of one program: its namespaces or folder, its limits and deadlines, and the
termination of all its processes. The program may be started several times in its sandbox."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, NoReturn

from rloo.addons.graders.code.guest import program, resource_limits, syscalls

_PATIENCE = 10.0  # seconds to wait for processes of the sandbox itself
_CHUNK = 1 << 16


class SandboxFailed(BaseException):
    """Raised if the sandbox itself failed; the program is not to blame."""


class ProgramTimeOver(BaseException):
    """Raised if the program's total time is over, or its processes together exceeded a limit. The
    program is not started again."""


def kill_all(outsider: int) -> None:
    """Kill every descendant of this process. The process must have restricted its signals. Linux
    signals all descendants in one step, so no new fork survives. Before any kill, raises
    SandboxFailed if a process outside the sandbox (`outsider`, the parent or process 1) could be
    signalled."""
    refused = False
    for pid in {outsider, os.getppid(), 1}:
        try:
            os.kill(pid, 0)
        except PermissionError:
            refused = True
        except ProcessLookupError:
            continue
        else:
            raise SandboxFailed(f"the process {pid}, outside, could be signalled")
    if not refused:
        raise SandboxFailed("no process outside is known")
    with suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


class SandboxedProcess:
    """A program in its sandbox: starts the program, exchanges data with it, and ends all its
    processes."""

    def __init__(self, wall: dict[str, Any], limits: dict[str, Any], channel: int) -> None:
        self._wall, self._worker = wall, os.getppid()
        self.limits = limits
        self._isolated = wall["kind"] == "bwrap"
        self._over: str | None = None
        self.closed: bool = False
        self._running: int | None = None
        self._clock = resource_limits.ProgramClock(limits)
        if self._isolated:
            self._folder = program.PRIVATE
            syscalls.unshare(syscalls.NEW_PROCESSES)  # applies to the next child
        else:
            syscalls.restrict_signals(wall["folder"])
            syscalls.take_orphans()
            self._folder = tempfile.mkdtemp(dir=wall["folder"])
        processes = limits["processes"] + (
            resource_limits.tasks_of(os.getuid()) if wall["shared_user"] else 8
        )
        here = {"folder": self._folder, "wall": wall, "limits": {**limits, "processes": processes}}
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            os.close(channel)
            _serve(theirs, here)
        theirs.close()
        self._control = ours
        self._control.settimeout(_PATIENCE)

    def start(self, request: dict[str, Any], files: list[int]) -> None:
        """Start a process for `request` with `files` (see `program.begin`). The files are closed in
        this process. Raises ProgramTimeOver if the program must not run any more."""
        try:
            if self._over is not None:
                raise ProgramTimeOver(self._over)
            content = json.dumps(request).encode()
            try:
                socket.send_fds(self._control, [b"r"], files)
                self._control.sendall(struct.pack("!i", len(content)) + content)
                self._running = struct.unpack("!i", self._hear())[0]
            except OSError as error:
                raise SandboxFailed("the stage has ended") from error
        finally:
            for file in files:
                os.close(file)

    def finish(self) -> int | None:
        """Kill the started process if it is still running. Returns its exit status (minus the
        signal's number if a signal ended it), or None if this function had to kill it."""
        if self._running is None or self._over is not None:
            return None
        killed = not select.select([self._control], [], [], 0)[0]
        try:
            if killed:
                self._control.sendall(b"k")
            status = struct.unpack("!i", self._hear())[0]
        except OSError as error:
            raise SandboxFailed("the stage has ended") from error
        self._running = None
        return None if killed else os.waitstatus_to_exitcode(status)

    def grant(self) -> None:
        """Start the time limit of one run or case."""
        self._clock.grant()

    def wait_ended(self) -> None:
        """Wait until the started process has ended or its time is over."""
        self.wait({self._control.fileno(): select.POLLIN})

    def wait(self, files: dict[int, int]) -> list[int]:
        """Wait for `files` (file -> events of `poll`). Returns the ready ones; none if the time is
        over. Raises ProgramTimeOver if a limit on all processes was exceeded, or the total time is
        over."""
        poll = select.poll()
        for file, events in files.items():
            poll.register(file, events)
        while True:
            if self._clock.due:  # also while data arrives continuously
                self._watch()
            if self._clock.is_over:
                return []
            begun = time.monotonic()
            ready = poll.poll(1000 * resource_limits.TICK)
            self._clock.wait(time.monotonic() - begun, came=bool(ready))
            if ready:
                return [file for file, _ in ready]

    def run(self, request: dict[str, Any], given: bytes) -> tuple[bytes, int | None]:
        """Run a process with `given` as its input. Returns the output and the exit status of the
        process; the status is None if a limit on time or output ended the process."""
        read, stdin = os.pipe()
        stdout, write = os.pipe()
        self.grant()
        parts: list[bytes] = []
        try:
            self.start(request, [read, write])
            os.set_blocking(stdin, False)
            left, waiting = memoryview(given), {stdout: select.POLLIN, stdin: select.POLLOUT}
            size = 0
            if not given:
                os.close(stdin)
                del waiting[stdin]
            while stdout in waiting:
                ready = self.wait(waiting)
                if not ready:
                    break
                if stdin in ready:
                    with suppress(BlockingIOError):
                        try:
                            left = left[os.write(stdin, left[:_CHUNK]) :]
                        except BrokenPipeError:
                            left = left[:0]
                    if not left:
                        del waiting[stdin]
                        os.close(stdin)
                if stdout in ready:
                    part = os.read(stdout, _CHUNK)
                    size += len(part)
                    if not part:
                        del waiting[stdout]
                    parts.append(part)
                    if size > self.limits["output"]:
                        break
            else:
                self.wait_ended()
            status = self.finish()
        finally:
            os.close(stdout)
            with suppress(OSError):
                os.close(stdin)
        return b"".join(parts)[: self.limits["output"]], status

    def close(self) -> None:
        """End every process of the program and remove its files."""
        self._control.close()
        if self._isolated:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # init: all of its namespace ends
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
        else:
            kill_all(self._worker)
            _remove(self._folder)
        self.closed = True

    def _hear(self) -> bytes:
        said = b""
        while len(said) < 4:
            part = self._control.recv(4 - len(said))
            if not part:
                raise SandboxFailed("the stage has ended")
            said += part
        return said

    def _stop(self, why: str) -> NoReturn:
        self._over = why
        if self._isolated:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        else:
            kill_all(self._worker)
        raise ProgramTimeOver(why)

    def _watch(self) -> None:
        """End the program if its processes together exceed a limit."""
        if os.getppid() != self._worker:
            raise SandboxFailed("the worker has ended")
        family = resource_limits.family(os.getpid(), self._pid)
        self._clock.look(family)
        where = None if self._isolated else self._folder
        socket_bytes = self._wall["socket"]
        why = resource_limits.too_much(family, self.limits, where, socket_bytes)
        if why is None and self._clock.is_all_over:
            why = "its whole time is over"
        if why is not None:
            self._stop(why)


def _serve(control: socket.socket, here: dict[str, Any]) -> NoReturn:
    """The stage process, the parent of the program. It starts the program and reports its exit
    status."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # init of a namespace ignores it
        syscalls.be_told_of_the_parents_end(signal.SIGKILL)
        if here["wall"]["kind"] == "bwrap":
            program.enter_own_files(here["limits"])
        while True:
            kind, files, *_ = socket.recv_fds(control, 1, 4)
            if kind == b"k":  # the program had already ended
                continue
            if not kind:
                break
            (size,) = struct.unpack("!i", _exactly(control, 4))
            request = json.loads(_exactly(control, size))
            pid = os.fork()
            if pid == 0:
                control.close()
                program.begin(request, files, here)
            for file in files:
                os.close(file)
            control.sendall(struct.pack("!i", pid))
            ended = os.pidfd_open(pid)
            ready = select.select([ended, control.fileno()], [], [])[0]
            if ended not in ready:
                control.recv(1)
                os.kill(pid, signal.SIGKILL)
            os.close(ended)
            control.sendall(struct.pack("!i", os.waitpid(pid, 0)[1]))
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    except ConnectionError:  # the clerk has ended
        pass
    except BaseException as error:
        print(f"the stage has failed: {error!r}", file=sys.__stderr__, flush=True)
    os._exit(1)


def _exactly(control: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = control.recv(size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


def empty(folder: str) -> None:
    """Remove the contents of a folder. Raises SandboxFailed."""
    for entry in list(os.scandir(folder)):
        _remove(entry.path)


def _remove(folder: str) -> None:
    """Remove a folder of any depth; no process may change it any more. Raises SandboxFailed."""
    beside, waiting, count = f"{folder}-", [folder], 0
    try:
        while waiting:
            place = waiting.pop()
            os.chmod(place, 0o700)
            with os.scandir(place) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)
                    # Moving subfolders up keeps every path short.
                    waiting.append(f"{beside}{(count := count + 1)}")
                    os.rename(entry.path, waiting[-1])
            os.rmdir(place)
    except OSError as error:
        raise SandboxFailed(f"{folder} could not be removed") from error
