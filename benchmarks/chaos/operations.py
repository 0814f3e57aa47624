"""The preloaded library of `operations.c`: compiles and arms it, and reads its log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OFF, LOG, KILL, FAIL, FAIL_ON = range(5)
OPEN, WRITE, TRUNCATE, RENAME, UNLINK, MKDIR, RMDIR, SYNC, SYNC_FOLDER, _READ, MARK = range(11)
CREATED, EMPTIED = 1, 2
SOURCE = Path(__file__).with_suffix(".c")
HEADER = struct.Struct("=IIQqIIQ")


@dataclass(frozen=True)
class Operation:
    """A file operation that succeeded. `data` is the written bytes; for a sync, the content of the
    file."""

    kind: int
    flags: int
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


def build(folder: Path) -> Path | str:
    """Compile the library into `folder`. Returns its path, or the reason why it was not
    compiled."""
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


# Larger than the number of operations of any run: operations are only counted.
NEVER = 2**30


def arm(
    library: ctypes.CDLL,
    below: Path,
    mode: int,
    at: int = NEVER,
    *,
    error: int = 0,
    log: Path | None = None,
) -> None:
    """Count the operations of this process in the folder `below` from now on, and act at number
    `at`."""
    import safetensors.torch

    setattr(safetensors.torch, "serialize_file", _serialize_file)  # noqa: B010
    to = None if log is None else str(log).encode()
    library.chaos_arm(str(below).encode(), to, mode, at, error)


def _serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
    """Do the same as safetensors, with equal file names and errors, but with calls of the C
    library. safetensors renames with a direct system call, which a preloaded library does not
    see."""
    from safetensors import SafetensorError, serialize

    path = Path(filename)
    temporary = path.with_name(f".tmp{os.urandom(3).hex()}")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            data = serialize(tensors, metadata)
            os.ftruncate(descriptor, len(data))
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise SafetensorError(f"Error while serializing: I/O error: {error}") from error


def read_log(path: Path) -> Iterator[Operation]:
    """The logged operations in order."""
    with path.open("rb") as file:
        while head := file.read(HEADER.size):
            kind, flags, inode, offset, *sizes = HEADER.unpack(head)
            one, other, data = (file.read(size) for size in sizes)
            names = os.fsdecode(one), os.fsdecode(other)
            yield Operation(kind, flags, inode, offset, names[0], names[1], data)
