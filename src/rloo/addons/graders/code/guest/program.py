"""The process of a program: sets limits and the seccomp filter, then runs the model's code.

After `begin`, no other process trusts this process. It knows no expected result.
"""

from __future__ import annotations

import atexit
import builtins
import os
import resource
import signal
import sys
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from rloo.addons.graders.code.guest import leetcode_nodes, syscalls
from rloo.addons.graders.code.guest import seccomp as calls
from rloo.addons.graders.code.guest.object_server import ObjectServer
from rloo.addons.graders.code.guest.program_source import implied

PRIVATE = "/tmp"  # in the program's own mounts
_CALLS, _RESULTS = 250, 251  # higher than the file descriptors that a program opens
_OPEN = open
_SHARED_MEMORY = 1 << 24
_OPEN_FILES = 256
_SIGNALS = 1024  # pending signals and timers


def enter_own_files(limits: dict[str, Any]) -> None:
    """Give this process new mounts: empty tmpfs folders, and no /proc."""
    syscalls.unshare(syscalls.NEW_MOUNTS)
    syscalls.mount_memory("/proc", size=4096, files=2, read_only=True)
    syscalls.mount_memory("/dev/shm", size=_SHARED_MEMORY, files=limits["files"])
    syscalls.mount_memory(PRIVATE, size=limits["disk"], files=limits["files"])


def begin(request: dict[str, Any], files: list[int], here: dict[str, Any]) -> NoReturn:
    """Run the program of `request`. `mode` is `run` (a stand-alone program; `files` are its stdin
    and stdout), `serve` (the judge calls the program's definitions over `files`), or `execute` (run
    the command `arguments`). `source` is the program's text. In `serve`, `setup` runs before the
    program. With `implied` the program may use names that it has not imported."""
    status = 1
    try:
        mode = request["mode"]
        serving = mode == "serve"
        _take(files, serving, bool(request.get("errors")))
        os.chdir(here["folder"])
        os.environ.update(HOME=here["folder"], TMPDIR=here["folder"])
        if "file" in request:
            with open(request["file"], "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(request["source"])
        _confine(here, request)
        if mode == "execute":
            os.execvp(request["arguments"][0], request["arguments"])
        status = _python(request, serving)
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)


def _take(files: list[int], serving: bool, errors: bool) -> None:
    """Close all files except the given ones. With `errors`, stderr goes to stdout, else to
    /dev/null."""
    silence = os.open(os.devnull, os.O_RDWR)
    if serving:
        files = [silence, silence, *files]
    for file, number in zip(files, (0, 1, _CALLS, _RESULTS), strict=False):
        os.dup2(file, number)
    os.dup2(1 if errors else silence, 2)
    os.closerange(3, _CALLS)
    os.closerange(_RESULTS + 1 if serving else _CALLS, 4096)


def _confine(here: dict[str, Any], request: dict[str, Any]) -> None:
    """Permanently drop all privileges that a program does not need."""
    wall, limits = here["wall"], here["limits"]
    by_path = wall["kind"] == "landlock"
    os.setsid()
    for number in range(1, signal.NSIG):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # All processes and sessions of the program share one processor.
    os.sched_setaffinity(0, {wall["processor"]})
    seconds = limits["total_seconds"] if request["mode"] == "serve" else limits["seconds"]
    # V8 and others reserve far more address space than they use.
    memory = resource.RLIMIT_DATA if request["mode"] == "execute" else resource.RLIMIT_AS
    for what, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(-(-seconds // 1))),
        (memory, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["disk"]),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _SIGNALS),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    if by_path:
        syscalls.restrict_files(wall["read"], wall["use"], [here["folder"]])
    syscalls.drop_capabilities()
    syscalls.filter_calls(calls.program(os.uname().machine, shared_user=wall["shared_user"]))


def _opened(file: Any, *given: Any, **named: Any) -> Any:
    """Python's `open`, in which /dev/stdin works without /proc."""
    is_input = isinstance(file, str) and file == "/dev/stdin"
    return _OPEN(0 if is_input else file, *given, **named)


def _python(request: dict[str, Any], serving: bool) -> int:
    """Run Python text as the interpreter would, and return the exit status."""
    source = request["source"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "rloo"]:
        del sys.modules[name]
    name = "solution" if serving else "__main__"
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    sys.argv = ["main.py"]
    status = 0
    module.__dict__.update(leetcode_nodes.KINDS)
    module.__dict__.update(implied(source, always=bool(request.get("implied"))))
    builtins.open = _opened
    try:
        if serving:
            setup = request.get("setup", "")
            ObjectServer(module.__dict__).serve(source, setup, (_CALLS, _RESULTS))
        else:
            exec(compile(source, "main.py", "exec"), module.__dict__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:
        status = status or 120
    return status & 0xFF
