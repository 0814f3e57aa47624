"""What the processes of a program have together, of which Linux limits no sum. Looked at now and
then, so that more may be there for a moment."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Any

_WRITTEN = 4  # times the bytes that its files may have at once


def too_much(root: int, limits: dict[str, Any], folder: str | None) -> str | None:
    """What a process and all that descend from it have too much of; None where nothing. `folder`
    has their files, where no file system of their own limits them."""
    family = _family(root)
    memory = sum(family.values())
    if memory > limits["memory"]:
        memory = sum(_own(pid, resident) for pid, resident in family.items())
    if memory > limits["memory"]:
        return f"its processes have {memory >> 20} MiB of memory"
    if folder is None:
        return None
    files, size = _files(folder, limits["files"])
    if files > limits["files"]:
        return f"it has {files} files"
    size += _unnamed(family)
    if size > limits["disk"]:
        return f"its files have {size >> 20} MiB"
    written = sum(map(_written, family))
    if written > _WRITTEN * limits["disk"]:
        return f"it has written {written >> 20} MiB"
    return None


def tasks_of(user: int) -> int:
    """How many threads this user has: Linux counts them all against a limit of processes."""
    count = 0
    for pid, fields in _processes().items():
        with suppress(OSError):
            count += int(fields[17]) if os.stat(f"/proc/{pid}").st_uid == user else 0
    return count


def _processes() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat after the name, of every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:
                found[int(name)] = file.read().rpartition(")")[2].split()
    return found


def _family(root: int) -> dict[int, int]:
    """Bytes of memory of a process and all that descend from it. What they share counts in each."""
    processes = _processes()
    children: dict[int, list[int]] = {}
    for pid, fields in processes.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found, waiting = {}, [root]
    while waiting:
        pid = waiting.pop()
        if pid in processes:
            found[pid] = int(processes[pid][21]) * os.sysconf("SC_PAGE_SIZE")
        waiting += children.get(pid, ())
    return found


def _own(pid: int, resident: int) -> int:
    """Bytes of a process, of what it shares its part. It takes longer, and may be forbidden."""
    with suppress(OSError, StopIteration), open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return resident


def _files(folder: str, most: int) -> tuple[int, int]:
    """How many files there are, of more than `most` perhaps not all, and their bytes."""
    count = size = 0
    waiting = [folder]
    while waiting and count <= most:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
    return count, size


def _unnamed(family: dict[int, int]) -> int:
    """Bytes of the open files that have no name any more."""
    found = {}
    for pid in family:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    of = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(of.st_mode) and of.st_nlink == 0:
                        found[of.st_dev, of.st_ino] = of.st_blocks * 512
    return sum(found.values())


def _written(pid: int) -> int:
    """Bytes that a process, and those of its children that have ended, have written to a disk."""
    with suppress(OSError, StopIteration), open(f"/proc/{pid}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))
    return 0
