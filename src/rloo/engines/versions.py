"""Weights as versions of a folder, for engines in other processes and on other machines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from rloo.dist.folders import discard, files_of, written

MANIFEST = "manifest.json"


class Versions:
    """The folders `v00000012`, ... in `folder`, of which each holds the weights of one version:
    written beside and renamed into place, so that a reader finds a whole one or none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        with written(self.folder, final.name) as temporary:
            write(temporary)
            body = {"version": version, "files": files_of(temporary)}
            (temporary / MANIFEST).write_text(json.dumps(body, indent=1))
        temporary.rename(final)
        return final

    def drop_older(self, version: int) -> None:
        """Remove all versions below one that every engine has acknowledged."""
        for older in self.all():
            if older < version:
                discard(self.path(older))
