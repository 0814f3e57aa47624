"""The two kinds of sandboxes for programs: starts them, and checks whether they work on this
machine.

`bwrap`: bubblewrap with setpriv and prlimit. Its namespaces have no network and only the
interpreter's files. Every program has nested namespaces. `landlock`: Landlock of Linux 6.12,
without namespaces. Every program has a folder. Both kinds have a seccomp filter and limits
(`guest/program.py`). A sandbox that fails the probe is not used. There is no third kind.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rloo.distributed.child_process import ChildProcess

ISOLATION_BACKENDS = ("bwrap", "landlock")
_TOOLS = ("bwrap", "setpriv", "prlimit")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf")
# Devices that can be mapped are excluded: shared memory of /dev/zero belongs to no process.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_FLAGS = ("-s", "-S", "-B", "-X", "utf8")
# Our code is sent as text, since the sandbox's user may have no access to our files.
_BOOT = """
import json, os, struct, sys, types
def read(count):
    parts = b""
    while len(parts) < count:
        part = os.read(channel, count - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return parts
channel = int(sys.argv.pop())
sys.path = [path for path in sys.path if path]
setup = json.loads(read(struct.unpack("!i", read(4))[0]))
for full, source in setup["modules"]:
    parent, _, name = full.rpartition(".")
    module = sys.modules[full] = types.ModuleType(full)
    setattr(sys.modules.setdefault(parent, types.ModuleType(parent)), name, module)
    exec(compile(source, name + ".py", "exec"), vars(module))
sys.modules[setup["main"]].main(channel, setup)
"""
_begun = itertools.count()
_ASK_PYTHON = (
    "import ctypes, json, resource, socket, sys; "
    "print(json.dumps([sys.base_prefix, sys.base_exec_prefix, sys.version_info[:2] >= (3, 10)]))"
)


class IsolationUnavailable(RuntimeError):
    """Raised if untrusted code cannot be contained on this machine. The message has the reason."""


@dataclass(frozen=True, slots=True)
class IsolatedProcess:
    """A sandboxed process before its first message. `told` is the part of the first message that
    describes the sandbox. `folder`, if any, is removed when the process has ended."""

    process: ChildProcess
    told: dict[str, Any]
    folder: str | None = None
    user: int | None = None

    def remove_folder(self, seconds: float = 5.0) -> None:
        """Remove the folder once the worker's forks have emptied it. If it still exists after
        `seconds`, remove it with its contents, as the user of the sandbox."""
        if self.folder is None:
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError):
                os.rmdir(self.folder)
            if not os.path.exists(self.folder):
                return
            time.sleep(0.02)
        given: dict[str, Any] = {} if self.user is None else {"user": self.user}
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, self.folder], stderr=subprocess.DEVNULL, **given)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter that the sandbox's user can read."""

    path: str
    folders: list[str] = field(default_factory=list)


def start(
    wall: str, channel: socket.socket, library: Sequence[str] = (), processor: int | None = None
) -> IsolatedProcess:
    """Start a sandboxed process that is connected to `channel`. The process can read the folders
    `library`. Its programs run on the CPU number `processor` (None: the first CPU that this process
    may use). Raises IsolationUnavailable and OSError."""
    user = _user()
    python = find_python(user)
    inner = [python.path, *_FLAGS, "-c", _BOOT]
    given: dict[str, Any] = {"channel": channel.fileno(), "quiet": True, "folder": "/"}
    told: dict[str, Any] = {"kind": wall, "shared_user": False, "library": [*library]}
    told["processor"] = min(os.sched_getaffinity(0)) if processor is None else processor
    told["socket"] = _socket_bytes()
    if wall == "bwrap":
        # Mounted at other paths: programs have a private /tmp, which would hide folders there.
        told["library"] = [f"/library/{number}" for number in range(len(library))]
        places = dict(zip(told["library"], library, strict=True))
        command = _bubblewrap(user, python, places, inner)
        return IsolatedProcess(ChildProcess(command, "channel", **given), told)
    folder = tempfile.mkdtemp(prefix="rloo-code-")
    if user is not None:
        # Processes of the sandbox are recognised only by this user.
        os.chown(folder, user, user)
        given["user"] = user
    told |= {
        "shared_user": user is None,
        "folder": folder,
        "read": [*_SYSTEM, *_SETTINGS, *python.folders, *library],
        "use": _DEVICES,
    }
    process = ChildProcess(inner, "channel", environment=_environment(folder), **given)
    return IsolatedProcess(process, told, folder, user)


def _socket_bytes() -> int:
    """The most unread bytes that a socket buffers."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 212_992  # Linux's default


def _environment(folder: str) -> dict[str, str]:
    home = {"HOME": folder, "TMPDIR": folder, "PATH": _PATH, "LANG": "C.UTF-8"}
    # A fixed hash seed makes programs reproducible. Fewer arenas need less address space.
    return {**home, "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}


def _bubblewrap(
    user: int | None, python: Interpreter, places: Mapping[str, str], inner: list[str]
) -> list[str]:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise IsolationUnavailable(f"there is no {' and no '.join(missing)}")
    command = ["prlimit", "--core=0", "--nofile=256", "--memlock=0", "--"]
    if user is not None:
        command += ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--"]
    command += ["bwrap", "--die-with-parent", "--new-session", "--clearenv", "--cap-add"]
    command += ["CAP_SYS_ADMIN", "--unshare-user"]
    command += [f"--unshare-{what}" for what in ("ipc", "pid", "net", "uts", "cgroup-try")]
    for name, value in _environment("/tmp").items():
        command += ["--setenv", name, value]
    for path in (*_SYSTEM, *_SETTINGS, *python.folders):
        if os.path.islink(path) and path in _SYSTEM:
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for place, path in places.items():
        command += ["--ro-bind-try", path, place]
    for path in _DEVICES:
        command += ["--dev-bind", path, path]
    folders = [word for path in ("/dev/shm", "/tmp") for word in ("--dir", path)]
    return [*command, *folders, "--proc", "/proc", "--remount-ro", "/", "--chdir", "/tmp", *inner]


def _user() -> int | None:
    """The user id of a new worker: an unused one if this process is root, else None (no change)."""
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        most = max(int(first) + int(count) for first, _, count in map(str.split, file))
    # Derived from the process id, so that concurrent processes use different user ids.
    base = 2_000_000_000 if most > 2_010_000_000 else 40_000
    number = os.getpid() * 64 + next(_begun) % 64
    return base + number % (20_000 if base == 40_000 else 10_000_000)


def find_python(user: int | None) -> Interpreter:
    """The first interpreter that `user` can run: this interpreter outside its virtual environment,
    or else the system's. Raises IsolationUnavailable."""
    return _find_python(user is not None)


@cache
def _find_python(other_user: bool) -> Interpreter:
    given: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            asked = subprocess.run(
                [path, *_FLAGS, "-c", _ASK_PYTHON],
                capture_output=True,
                cwd="/",
                env={"PATH": _PATH},
                timeout=60,
                **(given if other_user else {}),
            )
            *folders, new_enough = json.loads(asked.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        if new_enough:
            return Interpreter(path, sorted({f for f in folders if not f.startswith("/usr")}))
    raise IsolationUnavailable(
        "there is no Python of version 3.10 or later that an ordinary user can run"
    )


# -- the probe of a sandbox ------------------------------------------------------------------------

# Forbidden actions must fail, and allowed ones must work. The probe prints each exception.
PROBE = """
import ctypes, os, signal, socket, subprocess, sys, threading
def must_fail(what, work):
    try:
        work()
    except (OSError, ValueError):
        return
    print(what)
def must_work(what, work):
    try:
        assert work()
    except BaseException as error:
        print(what, repr(error))
def connect(kind):
    with socket.socket(socket.AF_INET, kind) as one:
        one.settimeout(1)
        one.connect({address!r})
        one.send(b"x")
must_fail("a file outside can be read", lambda: open({secret!r}).read())
must_fail("a file outside can be written", lambda: open({secret!r}, "a"))
must_fail("a folder outside can be written", lambda: open({folder!r} + "/new", "w"))
must_fail("processes outside can be signalled", lambda: os.kill({pid}, 0) if {pid} > 3 else 1 / 0)
must_fail("processes can be listed", lambda: open("/proc/1/status").read())
must_fail("a socket can be made", lambda: connect(socket.SOCK_STREAM))
must_fail("a datagram can be sent", lambda: connect(socket.SOCK_DGRAM))
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    print("namespaces can be made")
if {names!r} & os.environ.keys():
    print("the environment is there")
if os.getuid() == 0:
    print("it runs as root")
must_work("no file can be written:", lambda: open("own", "w").write("x"))
must_work("no thread can be started:", lambda: threading.Thread(target=int).start() is None)
must_work("no process can be started:", lambda: os.waitpid(os.fork() or os._exit(0), 0))
must_work("no program can be started:", lambda: subprocess.run(["true"]).returncode == 0)
print("probed")
"""


def write_probe(folder: str, address: tuple[str, int]) -> str:
    """The program that tests a sandbox. Each line of its output except `probed` is a fault."""
    secret = os.path.join(folder, "secret")
    with open(secret, "w") as file:
        file.write("secret")
    os.chmod(folder, 0o777)
    os.chmod(secret, 0o666)
    names = set(os.environ) - {*_environment(""), "PWD"}  # bubblewrap sets PWD
    known: Mapping[str, Any] = {
        "secret": secret, "folder": folder, "pid": os.getpid(), "address": address, "names": names,
    }  # fmt: skip
    return PROBE.format(**known)
