"""Atomic writes of folders: another process sees a complete folder or none."""

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

# The writer of an unlocked folder of at most this age, in seconds, may be about to lock it.
_JUST_MADE = 1.0


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk. Without this call, a power cut may
    lose them, and a rename may reach the disk before the renamed data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_directory(directory: Path, name: str) -> Iterator[Path]:
    """Yield a new folder `tmp-{name}-{pid}` in `directory`; its files are synced when the block
    ends. The caller then renames the folder. An error (also Ctrl-C) removes the folder. The folder
    of a killed process is removed by the next writer of this name."""
    temporary = directory / f"tmp-{name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    for other in directory.glob(f"tmp-{glob.escape(name)}-*"):
        process = other.name.removeprefix(f"tmp-{name}-")
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            _remove_abandoned(other)
    temporary.mkdir(parents=True)
    lock = None
    with suppress(OSError):  # on a file system without locks, no folder is removed either
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
    """Change the mode of files that have mode 600, as safetensors writes them, to the mode that new
    files get under this process's umask."""
    before = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(before)
    for file in files:
        if not file.is_symlink() and file.stat().st_mode & 0o777 == 0o600:
            file.chmod(0o666 & ~before)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder unless its writer holds the folder's lock."""
    with suppress(OSError):
        lock = FileLock(folder)
        try:
            if time.time() - folder.lstat().st_mtime > _JUST_MADE:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            lock.release()


def remove_tree(folder: Path) -> None:
    """Remove a folder. The folder is renamed first, so that an interrupted removal leaves no
    partial folder with the original name. If `folder` is a symlink, only the link is removed."""
    if folder.is_symlink():
        folder.unlink()
        return
    doomed = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def list_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """The size in bytes and the SHA-256 of every file in `folder`, by its path in the folder."""
    return {
        str(file.relative_to(folder)): {"size": file.stat().st_size, "sha256": hash_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
