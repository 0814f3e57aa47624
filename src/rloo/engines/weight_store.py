"""Weights as versions of a folder, for engines in other processes and on other machines."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from rloo.distributed.atomic_io import atomic_directory, list_files, remove_tree
from rloo.distributed.file_lock import FileLock

MANIFEST = "manifest.json"
# What folders of versions are called, and the file that their process has locked.
NAME, LOCK = "rloo-weights", "in-use"
SHARED = Path("/dev/shm")


class WeightStore:
    """The folders `v00000012`, ... in `folder`, of which each holds the weights of one version:
    written beside and renamed into place, so that a reader finds a whole one or none."""

    def __init__(self, folder: Path, lock: FileLock | None = None) -> None:
        self.folder, self._lock = folder, lock

    @classmethod
    def made_in(cls, parent: Path | None, token: str, size: int = 0) -> WeightStore:
        """A new folder in `parent` (None: in shared memory, where this machine has it, with room
        for three versions of `size` bytes), locked as long as this process lives. What killed
        processes have left there is removed: nobody else does."""
        if parent is None:
            roomy = SHARED.is_dir() and shutil.disk_usage(SHARED).free > 3 * size
            parent = SHARED if roomy else Path(tempfile.gettempdir())
        for other in parent.glob(f"{NAME}-*"):
            if (lock := locked(other)) is not None:
                shutil.rmtree(other, ignore_errors=True)
                lock.release()
        folder = parent / f"{NAME}-{token}"
        folder.mkdir(parents=True)
        return cls(folder, locked(folder))

    def remove(self) -> None:
        """Remove the folder with all versions."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def path(self, version: int) -> Path:
        """Where a version is, or will be."""
        return self.folder / f"v{version:08d}"

    def all(self) -> list[int]:
        """The versions that are there, from old to new."""
        names = [path.name for path in self.folder.glob("v*") if path.is_dir()]
        return sorted(int(name[1:]) for name in names if re.fullmatch(r"v\d{8,}", name))

    def write(self, version: int, write: Callable[[Path], object]) -> Path:
        """Have `write` fill the folder of a new version, and add the manifest. If it fails, nothing
        is left. Raises FileExistsError for a version that is there."""
        final = self.path(version)
        if final.exists():
            raise FileExistsError(f"{final} is there already; a version stands for one state")
        with atomic_directory(self.folder, final.name) as temporary:
            write(temporary)
            body = {"version": version, "files": list_files(temporary)}
            (temporary / MANIFEST).write_text(json.dumps(body, indent=1))
        temporary.rename(final)
        return final

    def drop_older(self, version: int) -> None:
        """Remove all versions below one that every engine has acknowledged."""
        self.keep({each for each in self.all() if each >= version})

    def keep(self, versions: Collection[int | None]) -> None:
        """Remove all others."""
        for each in self.all():
            if each not in versions:
                remove_tree(self.path(each))


def locked(folder: Path) -> FileLock | None:
    """The lock of `folder`; None where another process, of whatever container, has it."""
    with suppress(OSError):
        return FileLock(folder / LOCK, 0o600)
    return None
