"""The preloaded library of `operations.c`: made, armed, and its log read."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OFF, LOG, KILL, FAIL, FAIL_ON = range(5)
OPEN, WRITE, TRUNCATE, RENAME, UNLINK, MKDIR, RMDIR, SYNC, SYNC_FOLDER, _READ, MARK = range(11)
CREATED, EMPTIED = 1, 2
SOURCE = Path(__file__).with_suffix(".c")
HEADER = struct.Struct("=IIQqIIQ")


@dataclass(frozen=True)
class Operation:
    """One that succeeded. `data`: what was written, or of a sync everything that the file has."""

    kind: int
    flags: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def build(folder: Path) -> Path | str:
    """Compile the library into `folder`; returns its path, or why there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler"
    library = folder / "operations.so"
    made = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
    )
    return library if made.returncode == 0 else f"{compiler} fails: {made.stderr[:300]}"


def read_log(path: Path) -> Iterator[Operation]:
    """The operations in their order."""
    with path.open("rb") as file:
        while head := file.read(HEADER.size):
            kind, flags, inode, offset, *sizes = HEADER.unpack(head)
            names = [os.fsdecode(file.read(size)) for size in sizes[:2]]
            yield Operation(kind, flags, inode, offset, *names, file.read(sizes[2]))
