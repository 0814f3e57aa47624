"""A folder of weight versions for engines in other processes and on other machines."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo.distributed.atomic_io import atomic_directory, remove_tree
from rloo.distributed.file_lock import FileLock
from rloo.engines.vllm.server_plugin.rloo_weights import MANIFEST

# The name prefix of a store's folder, and the file in the folder that its process locks.
NAME, LOCK = "rloo-weights", "in-use"
SHARED = Path("/dev/shm")


class WeightStore:
    """The store `folder` has one folder per version of the weights: `v00000012`, ... A version is
    written to a temporary folder, which is then renamed. A reader therefore never sees an
    incomplete version."""

    def __init__(self, folder: Path, lock: FileLock | None = None) -> None:
        self.folder = folder
        self._lock = lock

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

    def write(self, version: int, write: Callable[[Path], Mapping[str, Any] | None]) -> Path:
        """Create a version: call `write` with its folder, and add the manifest, which also has the
        values that `write` returns. If `write` fails, the folder is removed. Raises FileExistsError
        if the version exists."""
        return self._write(self.path(version), version, write)

    def write_copy(self, version: int, write: Callable[[Path], Mapping[str, Any]]) -> Path:
        """Create a second folder for a version that is a delta. The folder has the complete
        weights, and is removed with the version."""
        return self._write(self.copy_path(version), version, write)

    def _write(
        self, final: Path, version: int, write: Callable[[Path], Mapping[str, Any] | None]
    ) -> Path:
        if final.exists():
            raise FileExistsError(f"{final} is there already; a version stands for one state")
        with atomic_directory(self.folder, final.name) as temporary:
            more = write(temporary) or {}
            sizes = {
                str(file.relative_to(temporary)): file.stat().st_size
                for file in sorted(temporary.rglob("*"))
                if file.is_file()
            }
            body = {"version": version, "files": sizes, **more}
            (temporary / MANIFEST).write_text(json.dumps(body))
        temporary.rename(final)
        return final

    def base(self, version: int) -> int | None:
        """The version that a delta is based on. None for a complete version."""
        body = json.loads((self.path(version) / MANIFEST).read_text())
        found: int | None = body.get("base")
        return found

    def complete(self, version: int) -> Path:
        """A complete version at which a reader can start: `version` or, for a delta, the first of
        the versions on which the delta is based."""
        while (base := self.base(version)) is not None:
            version = base
        return self.path(version)

    def drop_older(self, version: int) -> None:
        """Remove all versions below `version`, which every engine has acknowledged, except bases of
        later versions."""
        self.keep({each for each in self.all() if each >= version})

    def keep(self, versions: Collection[int | None]) -> None:
        """Remove all versions except `versions` and the versions on which they are based. A delta
        is removed before its base, so that no delta is ever without its base."""
        there = self.all()
        needed = {each for each in there if each in versions}
        for each in reversed(there):  # a base is older than its delta
            if each in needed and (base := self.base(each)) is not None:
                needed.add(base)
        for each in reversed(there):
            if each not in needed:
                if self.copy_path(each).exists():
                    remove_tree(self.copy_path(each))
                remove_tree(self.path(each))

    def copy_path(self, version: int) -> Path:
        """The folder of `write_copy`."""
        return self.folder / f"complete-{version:08d}"


def locked(folder: Path) -> FileLock | None:
    """Lock `folder` and return the lock. None if another process, in any container, has the
    lock."""
    with suppress(OSError):
        return FileLock(folder / LOCK, 0o600)
    return None
