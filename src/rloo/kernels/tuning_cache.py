"""The user's cache of results that are determined once per machine: builds and tuning choices."""

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
    """A folder that only the user can write to, since files in it are executed. If there is none, a
    temporary folder of this process."""
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
    """A text that identifies this processor and its features."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.machine() + platform.processor()
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    facts = ("model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return platform.machine() + "".join(line for line in lines if line.startswith(facts))


def names_kept(name: str, find: Callable[[], list[str]]) -> list[str]:
    """The names in the cache file `name`. If the file does not exist, return the result of `find`
    and store it in the file. If several processes call `find` at once, all return the names of the
    first process."""
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
            os.replace(made, file)  # the existing file contains no list of names
    return found


def _read(file: Path) -> list[str]:
    names = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError(f"{file} has no list of names")
    return names
