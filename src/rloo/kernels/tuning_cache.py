"""What was found out for a machine once and is kept for it, in the user's cache."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path


def folder() -> Path:
    """A folder that is the user's alone, since what lies there is run; where there can be none,
    one of this process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rloo")
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = base.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    return _private()


@cache
def _private() -> Path:
    return Path(tempfile.mkdtemp(prefix="rloo-kernels-"))


def processor() -> str:
    """Which one this is, and what it can do."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor()
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    facts = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(facts))


def names_kept(name: str, find: Callable[[], list[str]]) -> list[str]:
    """The names in this file, or those that `find` finds and that are kept from now on. Of several
    processes that find some at once all go on with those of the first."""
    file = folder() / name
    with contextlib.suppress(OSError, ValueError):
        return _read(file)
    found = find()
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as apart:
        made = Path(apart, name)
        made.write_text(json.dumps(found), encoding="utf-8")
        try:
            os.link(made, file)
        except FileExistsError:
            with contextlib.suppress(ValueError):
                return _read(file)
            os.replace(made, file)  # what lies there is no list
    return found


def _read(file: Path) -> list[str]:
    names = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError(f"{file} has no list of names")
    return names
