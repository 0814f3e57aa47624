"""The lock of an output folder: one run at a time."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rloo.distributed.file_lock import FileLock, LockUnavailable, require_free
from rloo.tracking.json_values import count, number, record, text
from rloo.tracking.run_reader import read_object

LOCK = ".lock"
_OWNER = record({"host": text, "process": count}, {"since": text, "began": number})
# Seconds between heartbeats, by which other hosts know that a run is alive.
BEAT = 5.0
# Tolerance in seconds for a process's start time, since the system clock may have been adjusted.
_SAME = 2.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this run in this block. The operating system releases the lock when the
    process ends, also when the process is killed.

    Raises ValueError if another run has the lock; the error has the run's host, process and start
    time. Some file systems do not lock between hosts. The lock of another host is therefore valid
    until it has had no heartbeat for three intervals (`BEAT`). A heartbeat is a change of the lock
    file's mtime; no clocks are compared.
    """
    path, over = folder / LOCK, threading.Event()
    lock = _lock(folder)
    try:
        _take(folder, lock)
        threading.Thread(target=_beat, args=(path, over), daemon=True).start()
        try:
            yield
        finally:
            with suppress(OSError):  # the folder is gone
                if _read(path).get("process") == os.getpid():
                    os.truncate(path, 0)
    finally:
        over.set()
        lock.release()


def _lock(folder: Path) -> FileLock:
    try:
        return FileLock(folder / LOCK)
    except BlockingIOError as error:
        raise _owned(folder, f"{error.strerror}") from error
    except LockUnavailable as error:
        raise ValueError(
            f"output_dir {folder} is on a file system without locks ({error.strerror}), by which a "
            "run knows that it is alone; name a folder elsewhere (output_dir)"
        ) from error


def _take(folder: Path, lock: FileLock) -> None:
    """Write this process into the lock file as owner. Raises ValueError if the folder belongs to a
    run on another host, or to a process on this host that has closed the lock file."""
    path, host = folder / LOCK, socket.gethostname()
    owner = _read(path)
    if owner and owner["host"] != host and _beats(path):
        raise _owned(folder, "it shows signs of life")
    if owner and owner["host"] == host and owner["process"] != os.getpid() and _is_there(owner):
        raise _owned(folder, "its process is there, and something in it has closed its lock")
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    own = {"host": host, "process": os.getpid(), "since": since}
    lock.write(json.dumps(own | {"began": psutil.Process().create_time()}))


def lives(folder: Path) -> bool:
    """Whether a run on any host owns `folder` now. On this host the process is looked up. For a run
    on another host the function waits for a heartbeat, at most three intervals. Takes no lock."""
    path = folder / LOCK
    owner = _read(path)
    here = owner.get("host") == socket.gethostname()
    return bool(owner) and (_is_there(owner) if here else _beats(path))


def _is_there(owner: Mapping[str, Any]) -> bool:
    """Whether the owner still runs on this host, and its pid has not been reused."""
    try:
        process = psutil.Process(owner["process"])
        same = abs(process.create_time() - owner.get("began", process.create_time())) < _SAME
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refuse_if_owned(folder: Path) -> None:
    """Raise the ValueError of `locked` if a run on this host owns `folder` now."""
    try:
        require_free(folder / LOCK)
    except BlockingIOError as error:
        raise _owned(folder, f"{error.strerror}") from error
    except OSError:  # no lock file, or no lock support: `locked` reports that
        return


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        try:
            os.utime(path)
        except OSError:  # the folder is gone or cannot be written: training raises the error
            return


def _beats(path: Path) -> bool:
    deadline = time.monotonic() + 3 * BEAT
    with suppress(FileNotFoundError):  # the file was removed meanwhile
        before = path.stat().st_mtime_ns
        while time.monotonic() < deadline:
            time.sleep(BEAT / 10)
            if path.stat().st_mtime_ns != before:
                return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """The owner of a lock; empty if there is no owner, or if the owner is not written yet."""
    return read_object(path, _OWNER)


def _owned(folder: Path, why: str) -> ValueError:
    for _ in range(20):
        if owner := _read(folder / LOCK):
            break
        time.sleep(0.05)  # the owner may have just started, and writes its entry next
    said = [f"{name} {owner[name]}" for name in ("host", "process", "since") if name in owner]
    who = " ".join(said) or "another process"
    return ValueError(
        f"output_dir {folder} belongs to a run that is going on ({who}: {why}); two runs in one "
        "folder would mix: wait for it, stop it, or name another folder (output_dir)"
    )
