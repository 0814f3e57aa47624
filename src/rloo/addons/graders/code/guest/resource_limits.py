"""Limits on the sum over all processes of a program: memory, files, time. Linux has no such limits,
so this module polls the usage. A program may therefore exceed a limit for a short time."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_WRITTEN = 4  # limit of written bytes, as a multiple of the limit of bytes in files
# Seconds between two polls.
TICK = 0.05
# The wall-clock limit is _PATIENCE times the time limit plus _MORE seconds: other programs may
# occupy the processors.
_PATIENCE, _MORE = 4, 10.0
# Most kernel memory of an open file, a pipe and a memory area, in bytes.
_FILE, _PIPE, _AREA = 1 << 14, 1 << 16, 1 << 10
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def wall_seconds(seconds: float) -> float:
    """The wall-clock limit, in seconds, of a program whose time limit is `seconds`."""
    return _PATIENCE * seconds + _MORE


@dataclass(frozen=True)
class ProcessUsage:
    """A process's values in /proc: its state (or the state of a thread if the first thread has
    ended); CPU seconds of the process and of its reaped children; bytes of resident memory and of
    page tables, swap and huge pages; the number of voluntary context switches."""

    place: str  # its folder in /proc
    begun: int
    state: str
    own: float
    waited: float
    resident: int
    tables: int = 0
    slept: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the process even if its process id is reused."""
        return self.place.split("/")[2], self.begun


class ProgramClock:
    """The time that a program has used: CPU time of all its processes, and time in which all of
    them are idle. Time in which a process waits for a busy processor is not counted."""

    def __init__(self, limits: dict[str, Any]) -> None:
        self._seconds, self._total = limits["seconds"], limits["total_seconds"]
        self._spent = self._used = self._waited = 0.0
        self._own: dict[tuple[str, int], float] = {}
        self._slept: dict[tuple[str, int], int] = {}
        self._seen = 0.0
        self._begun = self._looked = time.monotonic()
        self.grant()

    def grant(self) -> None:
        """Start the time limit of one run."""
        self._from, self._since = self._spent, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the next poll must be made now."""
        return time.monotonic() - self._looked >= TICK

    @property
    def is_over(self) -> bool:
        """Whether the time of one run is over."""
        by_clock = time.monotonic() - self._since
        return self._spent - self._from >= self._seconds or by_clock >= wall_seconds(self._seconds)

    @property
    def is_all_over(self) -> bool:
        """Whether the total time is over."""
        by_clock = time.monotonic() - self._begun
        return self._spent >= self._total or by_clock >= wall_seconds(self._total)

    def wait(self, seconds: float, *, came: bool) -> None:
        """Add seconds of waiting. If data arrived (`came`), at most TICK seconds count: in a longer
        wait this process had no processor."""
        self._waited += min(seconds, TICK) if came else seconds

    def look(self, family: ProcessFamily) -> None:
        """Add the program's time since the last poll."""
        self._looked = time.monotonic()
        passed, self._waited = self._waited, 0.0
        for process in family.members:
            self._seen += max(0.0, process.own - self._own.get(process.key, 0.0))
            self._own[process.key] = process.own
        # `_seen` includes processes that are never reaped; `waited` includes processes that end
        # between two polls.
        living = sum(process.own + process.waited for process in family.members)
        used = max(self._seen, living + family.waited, self._used)
        more, self._used = used - self._used, used
        # A process that has slept since the last poll may run only because the poll woke it.
        wants = any(
            process.state in "RD" and self._slept.get(process.key, process.slept) == process.slept
            for process in family.members
        )
        self._slept = {process.key: process.slept for process in family.members}
        self._spent += more if wants else max(more, passed)


@dataclass(frozen=True)
class ProcessFamily:
    """The processes of a program, and the CPU seconds of its ended processes."""

    members: list[ProcessUsage]
    waited: float


def family(clerk: int, stage: int) -> ProcessFamily:
    """All descendants of the clerk except for the stage process. The clerk adopts orphans."""
    processes = _processes()
    children: dict[int, list[int]] = {}
    for pid, fields in processes.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found, waiting = [], list(children.get(clerk, ()))
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, ())
        if pid != stage and pid in processes:
            found.append(_process(pid, processes[pid]))
    waited = _process(stage, processes[stage]).waited if stage in processes else 0.0
    return ProcessFamily(found, waited)


def _process(pid: int, fields: list[str]) -> ProcessUsage:
    place, state, resident = f"/proc/{pid}", fields[0], fields[21]
    if state not in "RD" and int(fields[17]) > 1:  # the first thread may have ended or sleep
        with suppress(OSError):
            for thread in os.listdir(f"{place}/task"):
                other = _fields(f"{place}/task/{thread}/stat")
                if other is not None and (
                    other[0] == "R" or (state in "ZX" and other[0] not in "ZX")
                ):
                    state, resident = other[0], other[21]
                    place = f"/proc/{pid}/task/{thread}" if fields[0] in "ZX" else place
                    break
    own, waited = (sum(map(int, fields[at : at + 2])) / _TICKS for at in (11, 13))
    told = _status(place)
    counted = ("VmPTE", "VmSwap", "HugetlbPages")
    tables = sum(1024 * int(told.get(name, "0").split()[0]) for name in counted)
    slept = int(told.get("voluntary_ctxt_switches", "0"))
    size = int(resident) * _PAGE
    return ProcessUsage(place, int(fields[19]), state, own, waited, size, tables, slept)


def too_much(
    family: ProcessFamily, limits: dict[str, Any], folder: str | None, socket_bytes: int
) -> str | None:
    """A description of the limit that a program exceeds, or None. `folder` is the folder of the
    program's files; None if they are in a file system with a size limit. A socket buffers at most
    `socket_bytes`."""
    living = [process for process in family.members if process.state not in "ZX"]
    kernel = _in_the_kernel(living, socket_bytes, limits["memory"])
    if kernel is None:
        return "one of its processes hides what it has"
    if folder is None and living:
        kernel += _in_files(living[0].place)
    memory = kernel + sum(process.resident for process in living)
    if memory > limits["memory"]:
        memory = kernel + sum(_own(process.place, process.resident) for process in living)
    if memory > limits["memory"]:
        return f"its processes have {memory >> 20} MiB of memory"
    if folder is None:
        return None
    files, size = _files(folder, limits["files"])
    if files > limits["files"]:
        return f"it has {files} files"
    size += _unnamed(living)
    if size > limits["disk"]:
        return f"its files have {size >> 20} MiB"
    written = sum(_written(process.place) for process in living)
    if written > _WRITTEN * limits["disk"]:
        return f"it has written {written >> 20} MiB"
    return None


def _in_the_kernel(living: list[ProcessUsage], socket_bytes: int, most: int) -> int | None:
    """An upper bound on kernel memory for open files, pipes, sockets, page tables and memory areas,
    in bytes; any number above `most` if the bound exceeds `most`. None if a process cannot be
    inspected, which does not happen with honest programs."""
    size, shared = 0, dict[str, int]()
    for process in living:
        if size > most:  # inspecting large processes is slow
            break
        place = process.place
        try:
            names = os.listdir(f"{place}/fd")
        except PermissionError:
            if _is_hidden(place):
                return None
            continue
        except OSError:
            continue
        for name in names:
            size += _FILE
            with suppress(OSError):
                target = os.readlink(f"{place}/fd/{name}")
                if target.startswith("socket:"):
                    shared[target] = socket_bytes
                elif target.startswith("pipe:"):
                    shared[target] = _PIPE
        size += process.tables + _AREA * _count_lines(f"{place}/maps")
    return size + sum(shared.values())


def _count_lines(path: str) -> int:
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 16), b""))
    return 0


def _is_hidden(place: str) -> bool:
    """Whether a process has memory and a seccomp filter but cannot be inspected. A process without
    a filter is one of ours that has not started its program yet."""
    told = _status(place)
    return "VmRSS" in told and told.get("Seccomp", "0").strip() != "0"


def _status(place: str) -> dict[str, str]:
    with suppress(OSError, ValueError), open(f"{place}/status") as file:
        return dict(line.split(":", 1) for line in file)
    return {}


def _in_files(place_of: str) -> int:
    """The bytes of a process's private files in memory."""
    size = 0
    for place in ("tmp", "dev/shm"):
        with suppress(OSError):
            told = os.statvfs(os.path.join(place_of, "root", place))
            size += (told.f_blocks - told.f_bfree) * told.f_frsize
    return size


def tasks_of(user: int) -> int:
    """The number of this user's threads, all of which Linux counts for RLIMIT_NPROC."""
    count = 0
    for pid, fields in _processes().items():
        with suppress(OSError):
            count += int(fields[17]) if os.stat(f"/proc/{pid}").st_uid == user else 0
    return count


def _processes() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat after the name, for every visible process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _fields(f"/proc/{name}/stat")) is not None:
            found[int(name)] = fields
    return found


def _fields(path: str) -> list[str] | None:
    with suppress(OSError), open(path, "rb") as file:
        return file.read().rpartition(b")")[2].decode().split() or None
    return None


def _own(place: str, resident: int) -> int:
    """A process's proportional set size in bytes. Reading it is slow, and may be forbidden."""
    try:
        with open(f"{place}/smaps_rollup") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return 0
    except OSError:
        return resident


def _files(folder: str, most: int) -> tuple[int, int]:
    """The number of files and their bytes; counting stops after `most` files."""
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


def _unnamed(living: list[ProcessUsage]) -> int:
    """The bytes of open files that were deleted."""
    found = {}
    for process in living:
        with suppress(OSError):
            for name in os.listdir(f"{process.place}/fd"):
                with suppress(OSError):
                    of = os.stat(f"{process.place}/fd/{name}")
                    if stat.S_ISREG(of.st_mode) and of.st_nlink == 0:
                        found[of.st_dev, of.st_ino] = of.st_blocks * 512
    return sum(found.values())


def _written(place: str) -> int:
    """Bytes that a process and its ended children have written to disk."""
    with suppress(OSError, StopIteration), open(f"{place}/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("write_bytes"))
    return 0
