"""The main loop of a sandbox worker: for each request, the worker forks a process, the clerk.

The clerk reads and answers the request; the worker never reads one. Before reading, the clerk forks
the stage process, which is the parent of the programs. Therefore no program inherits expected
results in its memory, neither of this request nor of an earlier one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rloo.addons.graders.code.guest import program, syscalls
from rloo.addons.graders.code.guest import seccomp as calls
from rloo.addons.graders.code.guest.process_tree import (
    SandboxedProcess,
    SandboxFailed,
    empty,
    kill_all,
)
from rloo.addons.graders.code.guest.resource_limits import wall_seconds

# Exit codes of a clerk without an answer.
_CLOSED, _FAILED = 3, 4
_CLERK_MEMORY = 1 << 30
_SPENT = b'a{"spent": true}'
# Signals that end a clerk when a program has sent too much data or crashed the clerk's interpreter.
_BY_A_PROGRAM = (signal.SIGXCPU, signal.SIGALRM, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# Modules that most programs import, loaded once here.
_WARM = (
    "array bisect collections copy decimal fractions functools heapq itertools json math operator "
    "random re statistics string threading typing"
)


def main(channel: int, setup: dict[str, Any]) -> None:
    """Answer requests over the file `channel` until the other side closes the channel."""
    wall = setup["wall"]
    if wall["kind"] == "landlock":
        folder = wall["folder"]
        read, use = [*wall["read"], "/proc"], [*wall["use"], "/dev/null"]
        syscalls.restrict_files(read, use, [folder], [os.path.dirname(folder)])
    importlib.import_module("builtins").__dict__.update(_exits())
    for name in _WARM.split():
        importlib.import_module(name)
    _load(setup["library"], wall, setup["limits"])
    handler = sys.modules[setup["handler"]].answer
    gc.collect()
    gc.freeze()
    while True:
        clerk = os.fork()
        if clerk == 0:
            _answer_one(channel, setup, handler)
        status = _wait_for(clerk, channel)
        if wall["kind"] == "landlock" and status != 0:
            kill_all(os.getppid())
            empty(wall["folder"])
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _BY_A_PROGRAM:
            _send(channel, _SPENT)
        elif status != 0:
            os._exit(0 if os.waitstatus_to_exitcode(status) == _CLOSED else 1)


def _load(modules: list[str], wall: dict[str, Any], limits: dict[str, Any]) -> None:
    """Import modules for programs. If an import fails, the program that needs it raises the
    error."""
    if not modules:
        return
    if wall["kind"] == "bwrap":  # some packages write to the home folder when imported
        syscalls.mount_memory(program.PRIVATE, size=limits["disk"], files=limits["files"])
    # Threads do not survive a fork.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    sys.path += wall["library"]
    said, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # hides warnings about missing optional parts
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    os.dup2(said, 2)
    os.close(said)
    os.close(nowhere)


def _exits() -> dict[str, Any]:
    """The functions `exit` and `quit`; `site`, which defines them, is not loaded."""
    quitter: Any = importlib.import_module("_sitebuiltins").Quitter
    return {name: quitter(name, "Ctrl-D") for name in ("exit", "quit")}


def _wait_for(clerk: int, channel: int) -> int:
    """The clerk's exit status. The clerk is terminated when the channel is closed."""
    ended = os.pidfd_open(clerk)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(channel, 0)  # reports only that the channel was closed
    while not any(file == ended for file, _ in poll.poll()):
        os.kill(clerk, signal.SIGTERM)
        poll.unregister(channel)
    os.close(ended)
    return os.waitpid(clerk, 0)[1]


def _answer_one(
    channel: int, setup: dict[str, Any], handler: Callable[[dict[str, Any], SandboxedProcess], Any]
) -> None:
    """Read one request, answer the request, and clean up. Never returns."""
    status, worker = _FAILED, os.getppid()
    try:
        stage = SandboxedProcess(setup["wall"], setup["limits"], channel)

        def stop(*_: Any) -> None:
            if not stage.closed:
                with suppress(SandboxFailed):
                    stage.close()
            _remove_folder(setup["wall"])
            os._exit(_FAILED)

        signal.signal(signal.SIGTERM, stop)
        syscalls.be_told_of_the_parents_end(signal.SIGTERM)
        if os.getppid() != worker:
            stop()
        _limit(setup["limits"])
        message = _receive(channel)
        said = None
        if message is not None:
            signal.alarm(int(2 * wall_seconds(setup["limits"]["total_seconds"])))
            said = _handled(message, stage, handler)
        stage.close()
        if message is None:
            _remove_folder(setup["wall"])
            status = _CLOSED
        elif said is not None:
            _send(channel, said)
            status = 0
    except ConnectionError:  # the other side has closed the channel
        status = _CLOSED
    except BaseException:
        if os.getppid() == worker:  # otherwise its folder may be gone
            traceback.print_exc()
    finally:  # a fork must never continue as the worker
        os._exit(status)


def _remove_folder(wall: dict[str, Any]) -> None:
    """Remove the worker's folder, since the worker may have ended already."""
    with suppress(OSError):
        os.rmdir(wall.get("folder", ""))


def _limit(limits: dict[str, Any]) -> None:
    """Limit the clerk's resources. If a program's output exhausts them, the program has failed."""
    seconds = int(limits["total_seconds"]) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_CLERK_MEMORY, _CLERK_MEMORY))
    syscalls.drop_capabilities()
    syscalls.filter_calls(calls.program(os.uname().machine, shared_user=False))


def _handled(
    message: bytes,
    stage: SandboxedProcess,
    handler: Callable[[dict[str, Any], SandboxedProcess], Any],
) -> bytes | None:
    try:
        return b"a" + json.dumps(handler(json.loads(message), stage)).encode()
    except SandboxFailed:
        traceback.print_exc()
        return None
    except Exception as error:
        kind = type(error)
        known = {"type": kind.__name__, "module": kind.__module__, "text": str(error), "notes": []}
        return b"f" + json.dumps(known | {"trace": traceback.format_exc()}).encode()


def _receive(channel: int) -> bytes | None:
    """The next message, framed as by multiprocessing's connections; None at the end."""
    head = _read(channel, 4)
    return None if head is None else _read(channel, struct.unpack("!i", head)[0])


def _read(channel: int, count: int) -> bytes | None:
    parts = []
    while count > 0:
        part = os.read(channel, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _send(channel: int, message: bytes) -> None:
    left = memoryview(struct.pack("!i", len(message)) + message)
    while left:
        left = left[os.write(channel, left) :]
