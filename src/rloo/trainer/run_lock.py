"""One run at a time in an output folder."""

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
# Seconds between signs of life, by which a run on another host is known to be going on.
BEAT = 5.0
# Seconds by which the clock that a process's beginning is told by may have been set meanwhile.
_SAME = 2.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Own `folder` in this block. The system ends the lock with the process, however it dies.

    Raises ValueError with host, process and start of the run that owns it. Not every file system
    locks between hosts: a lock of another host counts until it has shown no sign of life for three
    beats, by its file's time of change, not by clocks.
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
    """Write the owner into a lock, unless another host's run, or one that has closed its lock, owns
    the folder."""
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
    """Whether a run owns `folder` now, on whatever host: on this one its process is looked for, and
    elsewhere its signs of life, for three beats at most. Nothing is locked for it."""
    path = folder / LOCK
    owner = _read(path)
    here = owner.get("host") == socket.gethostname()
    return bool(owner) and (_is_there(owner) if here else _beats(path))


def _is_there(owner: Mapping[str, Any]) -> bool:
    """Whether a process of this host goes on, and its number is not another's by now."""
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
    except OSError:  # there is no lock, or there can be none: `locked` will tell
        return


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        try:
            os.utime(path)
        except OSError:  # the folder is gone or cannot be written; training will tell
            return


def _beats(path: Path) -> bool:
    deadline = time.monotonic() + 3 * BEAT
    with suppress(FileNotFoundError):  # it is taken away meanwhile
        before = path.stat().st_mtime_ns
        while time.monotonic() < deadline:
            time.sleep(BEAT / 10)
            if path.stat().st_mtime_ns != before:
                return True
    return False


def _read(path: Path) -> dict[str, Any]:
    """Whose a lock is; nobody's is empty, as that of who is about to write it."""
    return read_object(path, _OWNER)


def _owned(folder: Path, why: str) -> ValueError:
    for _ in range(20):
        if owner := _read(folder / LOCK):
            break
        time.sleep(0.05)  # it has just begun, and writes its name next
    said = [f"{name} {owner[name]}" for name in ("host", "process", "since") if name in owner]
    who = " ".join(said) or "another process"
    return ValueError(
        f"output_dir {folder} belongs to a run that is going on ({who}: {why}); two runs in one "
        "folder would mix: wait for it, stop it, or name another folder (output_dir)"
    )
