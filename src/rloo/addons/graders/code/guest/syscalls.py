"""Linux system calls that Python lacks: namespaces, mounts, capabilities, Landlock, seccomp.

Every function raises OSError with the call's name if the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

NEW_MOUNTS, NEW_PROCESSES = 0x00020000, 0x20000000
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
_PR_PDEATHSIG, _PR_SUBREAPER, _PR_NO_NEW_PRIVS, _PR_SECCOMP = 1, 36, 38, 22
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
# Landlock's rights in version 6, the first version with a scope for signals (Linux 6.12).
LANDLOCK_VERSION = 6
_EVERYTHING = (1 << 16) - 1
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, list folders
_OF_A_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_WRITE_FILE, _REMOVE_FOLDER, _MOVE = 1 << 1, 1 << 4, 1 << 13
_TCP, _ABSTRACT_SOCKETS, _SIGNALS = 0b11, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: object) -> int:
    result = int(getattr(_libc, function)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    return _call("syscall", ctypes.c_long(number), *arguments)


def _prctl(*arguments: int) -> None:
    _call("prctl", *map(ctypes.c_ulong, (*arguments, *[0] * (5 - len(arguments)))))


def unshare(flags: int) -> None:
    """Create namespaces for this process, or for its children."""
    _call("unshare", flags)


def mount_memory(path: str, *, size: int, files: int, read_only: bool = False) -> None:
    """Mount an empty tmpfs at `path`, limited to `size` bytes and `files` files."""
    options = f"size={size},nr_inodes={files},mode=0755".encode()
    flags = _NO_SUID | _NO_DEVICES | (_READ_ONLY if read_only else 0)
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(flags), options)


def be_told_of_the_parents_end(number: int) -> None:
    """Make the kernel send this signal to this process when its parent ends."""
    _prctl(_PR_PDEATHSIG, number)


def take_orphans() -> None:
    """Become the parent of descendants whose parent has ended."""
    _prctl(_PR_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Permanently drop every capability."""
    _prctl(_PR_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", 0x20080522, 0)
    _syscall(_CAPSET[os.uname().machine], header, bytes(24))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter for all later system calls."""
    _prctl(_PR_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(head, len(head))
    _prctl(_PR_SECCOMP, 2, ctypes.addressof(pointer))


def landlock_version() -> int:
    """The Landlock version of this kernel; 0 without Landlock."""
    try:
        return _syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def restrict_signals(folder: str) -> None:
    """Allow this process and its children to send signals only to one another. Every Landlock
    ruleset forbids moving files between folders by default; under `folder` it stays allowed."""
    _restrict(struct.pack("QQQ", _MOVE, 0, _SIGNALS), {folder: _MOVE})


def restrict_files(
    read: Iterable[str], use: Iterable[str], write: Iterable[str], clear: Iterable[str] = ()
) -> None:
    """Restrict file access of this process and its children. They may read and execute files under
    `read`, read and write the files `use`, remove empty folders under `clear`, and do everything
    under `write`. They have no access to other files, to TCP, or to sockets of other processes, and
    cannot signal other processes. Paths that do not exist are ignored."""
    rights = dict.fromkeys(read, _READ)
    rights.update(dict.fromkeys(clear, _REMOVE_FOLDER))
    rights.update(dict.fromkeys(use, _READ | _WRITE_FILE))
    rights.update(dict.fromkeys(write, _EVERYTHING))
    scoped = _ABSTRACT_SOCKETS | _SIGNALS
    _restrict(struct.pack("QQQ", _EVERYTHING, _TCP, scoped), rights)


def _restrict(attributes: bytes, rights: dict[str, int]) -> None:
    ruleset = _syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    try:
        for path, right in rights.items():
            if os.path.exists(path):
                _allow(ruleset, path, right if os.path.isdir(path) else right & _OF_A_FILE)
        _prctl(_PR_NO_NEW_PRIVS, 1)
        _syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, right: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", right, place)
        _syscall(_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0))
    finally:
        os.close(place)
