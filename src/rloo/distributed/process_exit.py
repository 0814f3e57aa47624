"""Guards against calls that end or replace this process while its work is unfinished."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rloo.distributed.standard_streams import say

_REPLACING = ("execv", "execve")  # all other functions of the exec family call one of these


@contextmanager
def no_silent_end(what: str) -> Iterator[None]:
    """Within this context, os._exit(0) from any thread ends this process with status 1 and prints
    the caller. os.exec*, which would replace this process, raises PermissionError. `what` names the
    running work in messages. Forked children are not affected."""
    process, before = os.getpid(), {name: getattr(os, name) for name in ("_exit", *_REPLACING)}

    def leave(status: int) -> None:
        if os.getpid() == process and status == 0:
            say(f"rloo: {_caller()} called os._exit(0), and {what} has not ended", sys.stderr)
            status = 1
        before["_exit"](status)

    def guarded(name: str) -> Any:
        def replace(path: Any, *arguments: Any) -> None:
            if os.getpid() == process:
                raise PermissionError(
                    f"os.{name}({path!r}) would put another program in the place of {what}, which "
                    "has not ended; start it with subprocess"
                )
            before[name](path, *arguments)

        return replace

    here = {"_exit": leave, **{name: guarded(name) for name in _REPLACING}}
    for name, function in here.items():
        setattr(os, name, function)
    try:
        yield
    finally:
        for name, function in here.items():
            if getattr(os, name) is function:
                setattr(os, name, before[name])


def _caller() -> str:
    frame = traceback.extract_stack()[-3]
    return f"{frame.filename}:{frame.lineno} ({threading.current_thread().name})"
