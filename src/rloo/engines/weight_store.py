"""A folder of weight versions for engines in other processes and on other machines."""

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
# The name prefix of a store's folder, and the file in the folder that its process locks.
NAME, LOCK = "rloo-weights", "in-use"
SHARED = Path("/dev/shm")


class WeightStore:
    """The store `folder` has one folder per version of the weights: `v00000012`, ... A version is
    written to a temporary folder, which is then renamed. A reader therefore never sees an
    incomplete version."""

    def __init__(self, folder: Path, lock: FileLock | None = None) -> None:
        self.folder, self._lock = folder, lock

    @classmethod
    def made_in(cls, parent: Path | None, token: str, size: int = 0) -> WeightStore:
        """Create a folder in `parent`, locked until this process ends. If `parent` is None, the
        folder is in shared memory if there is room for three versions of `size` bytes, otherwise in
        the temporary folder. Stores of killed processes are removed from `parent`."""
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
        """The folder of a version, which need not exist yet."""
        return self.folder / f"v{version:08d}"

    def all(self) -> list[int]:
        """The versions that exist, from old to new."""
        names = [path.name for path in self.folder.glob("v*") if path.is_dir()]
        return sorted(int(name[1:]) for name in names if re.fullmatch(r"v\d{8,}", name))

    def write(self, version: int, write: Callable[[Path], object]) -> Path:
        """Create a version: call `write` with its folder, and add the manifest. If `write` fails,
        the folder is removed. Raises FileExistsError if the version exists."""
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
        """Remove all versions below `version`, which every engine has acknowledged."""
        self.keep({each for each in self.all() if each >= version})

    def keep(self, versions: Collection[int | None]) -> None:
        """Remove all versions except `versions`."""
        for each in self.all():
            if each not in versions:
                remove_tree(self.path(each))


def locked(folder: Path) -> FileLock | None:
    """Lock `folder` and return the lock. None if another process, in any container, has the
    lock."""
    with suppress(OSError):
        return FileLock(folder / LOCK, 0o600)
    return None
