"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

LOCK = ".lock"
# The files of the locks held here: a forked child must not keep them when this process is gone.
_held: set[int] = set()
# Seconds between signs of life, by which a run on another host is known to be going on.
BEAT = 5.0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Own `folder` in this block. The system ends the lock with the process, however it dies.

    Raises ValueError with host, process and start of the run that owns it. Not every file system
    locks between hosts: a lock of another host counts until it has shown no sign of life for three
    beats, by its file's time of change, not by clocks.
    """
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _owned(folder, f"{error.strerror}") from error
        except OSError as error:
            raise ValueError(
                f"output_dir {folder} is on a file system without locks ({error.strerror}), by "
                "which a run knows that it is alone; name a folder elsewhere (output_dir)"
            ) from error
        host = socket.gethostname()
        if _read(path).get("host", host) != host and _lives(path):
            raise _owned(folder, "it shows signs of life")
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        json.dump({"host": host, "process": os.getpid(), "since": started}, file)
        file.flush()
        over = threading.Event()
        threading.Thread(target=_beat, args=(path, over), daemon=True).start()
        _held.add(file.fileno())
        try:
            yield
        finally:
            _held.discard(file.fileno())
            over.set()
            file.truncate(0)


def lives(folder: Path) -> bool:
    """Whether a run owns `folder` now, on whatever host: on this one its process is looked for, and
    elsewhere its signs of life, for three beats at most. Nothing is locked for it."""
    path = folder / LOCK
    owner = _read(path) if path.exists() else {}
    if owner.get("host") != socket.gethostname():
        return bool(owner) and _lives(path)
    try:
        return psutil.Process(int(owner["process"])).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refuse_if_owned(folder: Path) -> None:
    """Raise the ValueError of `locked` if a run on this host owns `folder` now."""
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _owned(folder, f"{error.strerror}") from error
    except OSError:  # there is no lock, or there can be none: `locked` will tell
        return


def _let_go() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT):
        try:
            os.utime(path)
        except OSError:  # the folder is gone or cannot be written; training will tell
            return


def _lives(path: Path) -> bool:
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + 3 * BEAT
    while time.monotonic() < deadline:
        time.sleep(BEAT / 10)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _read(path: Path) -> dict[str, str]:
    try:
        owner = json.loads(path.read_text())
    except ValueError:  # nobody's, or about to be somebody's
        return {}
    return owner if isinstance(owner, dict) else {}


def _owned(folder: Path, why: str) -> ValueError:
    for _ in range(20):
        if owner := _read(folder / LOCK):
            break
        time.sleep(0.05)  # it has just begun, and writes its name next
    who = " ".join(f"{name} {value}" for name, value in owner.items()) or "another process"
    return ValueError(
        f"output_dir {folder} belongs to a run that is going on ({who}: {why}); two runs in one "
        "folder would mix: wait for it, stop it, or name another folder (output_dir)"
    )
