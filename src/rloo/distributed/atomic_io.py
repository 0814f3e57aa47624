"""Folders that other processes read: each is there as a whole, or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rloo.distributed.file_lock import FileLock

# Seconds within which a folder that is not locked may be about to be.
_JUST_MADE = 1.0


def fsync_path(path: Path) -> None:
    """Have a file's data, or a folder's names, on the disk: without it a power cut may lose them,
    and a rename may reach the disk before what was renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_directory(directory: Path, name: str) -> Iterator[Path]:
    """A new folder `tmp-{name}-{process}` in `directory`, to be renamed into place afterwards; what
    the block writes there is then on the disk. If it fails, even by Ctrl-C, nothing is left; what a
    process has left that was killed, the next one that writes this name removes."""
    temporary = directory / f"tmp-{name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    for other in directory.glob(f"tmp-{glob.escape(name)}-*"):
        process = other.name.removeprefix(f"tmp-{name}-")
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            _remove_abandoned(other)
    temporary.mkdir(parents=True)
    lock = None
    with suppress(OSError):  # where nothing can be locked, nothing is removed either
        lock = FileLock(temporary)
    try:
        yield temporary
        open_as_usual(temporary.rglob("*.safetensors"))
        for item in (*temporary.rglob("*"), temporary):
            fsync_path(item)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            lock.release()


def open_as_usual(files: Iterable[Path]) -> None:
    """Give files that their owner alone may read, as safetensors makes them, the mode that this
    process gives to new ones."""
    before = os.umask(0o077)  # nothing else tells it
    os.umask(before)
    for file in files:
        if not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~before)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder that nobody writes, whoever does being known by its lock."""
    with suppress(OSError):
        lock = FileLock(folder)
        try:
            if time.time() - folder.lstat().st_mtime > _JUST_MADE:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            lock.release()


def remove_tree(folder: Path) -> None:
    """Remove a folder, renamed first, so that half a removal does not leave half of it. Of a link
    the link alone goes: what it leads to is elsewhere."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def list_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """The size in bytes and the SHA-256 of every file in `folder`, by its path there."""
    return {
        str(file.relative_to(folder)): {"size": file.stat().st_size, "sha256": hash_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
