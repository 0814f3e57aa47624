"""A file lock that the system releases when its process ends, also after a kill."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

# Device and inode of each lock that this process holds, by descriptor. A reward function may have
# closed a descriptor. Device and inode show whether the descriptor's number now belongs to another
# file.
_held: dict[int, tuple[int, int]] = {}


class LockUnavailable(OSError):
    """Raised if the file system does not support locks."""


class FileLock:
    """An exclusive lock on a folder or a file, until `release`. A missing file is created. Raises
    BlockingIOError if the lock is held already, and LockUnavailable."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._descriptor = os.open(path, flags, mode)
        _held[self._descriptor] = _identity(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise LockUnavailable(error.errno, error.strerror) from error

    def write(self, text: str) -> None:
        """Replace the content of the file."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def release(self) -> None:
        """Release the lock; may be repeated."""
        _release(self._descriptor)


def require_free(path: Path) -> None:
    """Raise BlockingIOError if another process holds the file's lock, and OSError if the file does
    not exist. The call creates no file and leaves no lock."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _release(descriptor: int) -> None:
    """Close a lock's descriptor, unless it was closed and its number now belongs to another
    file."""
    file = _held.pop(descriptor, None)
    with suppress(OSError):  # the descriptor is closed
        if _identity(descriptor) == file:
            os.close(descriptor)


def _release_all() -> None:
    for descriptor in list(_held):
        _release(descriptor)


# A forked child would hold the locks after this process has ended.
os.register_at_fork(after_in_child=_release_all)
