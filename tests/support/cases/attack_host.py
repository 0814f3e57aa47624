"""The host of attacks: what it keeps secret, what it listens to, and how it sees an escape."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import resource
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path

from support.cases import CALLS, Attack
from support.cases.attack_watch import (
    Listeners,
    Victim,
    Watcher,
    end_all,
    state_of,
    wait_for_end,
)

KEPT_FILES = ("kept", "moved", "removed")
SYSTEM_FOLDERS = ("/etc", "/usr", "/var", "/")
NAMESPACES = ("user", "mnt", "net", "pid", "ipc", "uts")


class Host:
    """Enter it before what runs programs starts; its limits are those that are promised there.

    `seconds` of wall time a program (and `slack` for a busy machine), `memory` bytes and
    `processes` (threads too) of all of its processes, `files`, `disk` bytes, bytes of `output`.
    """

    grace = 1.0  # seconds for processes to go after their program's end

    def __init__(
        self,
        *,
        seconds: float = 3.0,
        slack: float = 5.0,
        memory: int = 1 << 30,
        processes: int = 256,
        **room: int,
    ) -> None:
        limits = {"files": 20_000, "disk": 1 << 30, "output": 16 << 20} | room
        assert len(limits) == 3, f"no limits of these names: {sorted(room)}"
        self.seconds, self.slack, self.memory, self.processes = seconds, slack, memory, processes
        self.output = limits["output"]
        self.tag = f"esc{secrets.token_hex(4)}"
        self.secrets = {
            name: f"HOSTSECRET-{secrets.token_hex(16)}"
            for name in ("environment", "file", "home", "run", "held", "socket", "key")
        }
        self._limits = {"seconds": seconds, "memory": memory, "processes": processes} | limits
        self._last: Attack | None = None

    def __enter__(self) -> Host:
        self._stack = contextlib.ExitStack()
        self._signals: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="host-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._make_files()
        self._set_environment()
        self.listeners = Listeners(self.folder / "sockets", self.tag, self.secrets["socket"])
        self._stack.callback(self.listeners.close)
        self._key = add_key(f"host_{self.tag}", self.secrets["key"])
        self._stack.callback(self._forget_key)
        self.victim = Victim(self.secrets["environment"])
        self._stack.callback(lambda: self.victim.close())
        if threading.current_thread() is threading.main_thread():
            old = signal.signal(signal.SIGURG, lambda *_: self._signals.append("SIGURG"))
            self._stack.callback(signal.signal, signal.SIGURG, old)
        self._stack.callback(self._remove_traces)
        self._stack.callback(end_all, self.tag)
        self._folder_state = self._state_of_folders()
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def _make_files(self) -> None:
        self.folder.chmod(0o755)
        for name in ("secret", "home", "home/.ssh", "home/.cache/huggingface", "run", "sockets"):
            (self.folder / name).mkdir(parents=True)
        self.outside = self.folder / "outside"
        self.outside.mkdir()
        wanted = {
            "secret/secret.txt": "file",
            "home/.netrc": "home",
            "home/.ssh/id_ed25519": "home",
            "home/.cache/huggingface/token": "home",
            "run/tests.json": "run",
            "run/metrics.jsonl": "run",
        }
        for path, name in wanted.items():
            (self.folder / path).write_text(self.secrets[name])
        self._fill_outside()
        for path in [self.folder, *self.folder.rglob("*")]:
            path.chmod(0o777 if path.is_dir() else 0o666)
        # A descriptor that a careless judge gives to its children.
        self._held = self.folder / "held"
        self._held.write_text(self.secrets["held"])
        self.held_descriptor = os.open(self._held, os.O_RDWR)
        os.set_inheritable(self.held_descriptor, True)
        self._stack.callback(os.close, self.held_descriptor)

    def _fill_outside(self) -> None:
        for path in self.outside.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name in KEPT_FILES:
            (self.outside / name).write_text("kept by the host")
            (self.outside / name).chmod(0o666)

    def _set_environment(self) -> None:
        before = dict(os.environ)
        os.environ["RLOO_TEST_TOKEN"] = self.secrets["environment"]
        os.environ.setdefault("HF_TOKEN", self.secrets["environment"])

        def restore() -> None:
            for name in ("RLOO_TEST_TOKEN", "HF_TOKEN"):
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]

        self._stack.callback(restore)

    def begin(self, attack: Attack) -> str:
        """The program of an attack for this host; its time starts."""
        if attack.before is None or self._last is None or self._last.name != attack.before:
            self._remove_traces()
        self._last = attack
        self.listeners.heard.clear()
        self._signals.clear()
        self._settings = self._settings_now()
        self._watcher = Watcher(self.tag)
        self._begun = time.monotonic()
        return self.fill(attack.program)

    def fill(self, program: str) -> str:
        """A program with this host's paths, ports and numbers in place of {secret_path}, ..."""
        values = {
            "secret_path": self.folder / "secret/secret.txt",
            "home": self.folder / "home",
            "run": self.folder / "run",
            "outside": self.outside,
            "unix_path": self.listeners.unix_path,
            "unix_datagram": self.listeners.unix_datagram,
            "abstract": self.tag,
            "port": self.listeners.port,
            "udp_port": self.listeners.udp_port,
            "lan": self.listeners.lan,
            "lan_port": self.listeners.lan_port,
            "pid": self.victim.pid,
            "pgid": self.victim.pid,
            "address": self.victim.address,
            "judge_pid": os.getpid(),
            "key_name": f"host_{self.tag}",
            "ipc_key": self._ipc_key,
            "namespaces": " ".join(map(namespace, NAMESPACES)),
            "tag": self.tag,
            **self._limits,
        }
        for name, value in values.items():
            program = program.replace("{" + name + "}", str(value))
        return program

    def escapes(self, name: str, output: str | bytes) -> list[str]:
        """Plain sentences on what got out since `begin`; none when all was contained."""
        took = time.monotonic() - self._begun
        assert self._last is not None and self._last.name == name, "another attack has begun"
        data = output if isinstance(output, bytes) else output.encode(errors="surrogateescape")
        found = [f"the program says {line}" for line in claims(data)]
        found += [f"the secret of its {what} came out" for what in self._secrets_in(data)]
        if took > self.seconds + self.slack:
            found.append(f"it took {took:.1f} s of {self.seconds} s")
        if len(data) > self.output:
            found.append(f"{len(data)} bytes of output came back, of at most {self.output}")
        outlived = wait_for_end(self.tag, self.grace)
        found += [f"process {pid} outlives its program" for pid in outlived]
        # What a program leaves is found by the one that looks for it.
        if outlived and not name.startswith("leave_"):
            end_all(self.tag)
        self._watcher.close()
        if self._watcher.processes > self.processes:
            found.append(f"{self._watcher.processes} processes, of at most {self.processes}")
        if self._watcher.bytes > self.memory:
            found.append(f"{self._watcher.bytes} bytes of memory, of at most {self.memory}")
        found += self._harm() + self._changes() + self.listeners.heard + self._traces()
        return list(dict.fromkeys(found))

    def _harm(self) -> list[str]:
        found = self.victim.harm()
        if self._signals:
            found.append(f"the judge got {' '.join(sorted(set(self._signals)))}")
        if self.victim.is_alive:
            now = self._settings_now()
            found += [
                f"{what} was {self._settings[what]} and is {now[what]}"
                for what in now
                if now[what] != self._settings[what]
            ]
        else:
            self.victim.close()
            self.victim = Victim(self.secrets["environment"])
        return found

    def _changes(self) -> list[str]:
        now, before = self._state_of_folders(), self._folder_state
        found = [f"{path} is new" for path in now if path not in before]
        found += [f"{path} is gone" for path in before if path not in now]
        found += [f"{p} was changed" for p in now if p in before and now[p] != before[p]]
        if found:
            self._fill_outside()
            self._held.write_text(self.secrets["held"])
            self._folder_state = self._state_of_folders()
        return found

    def _state_of_folders(self) -> dict[str, tuple]:
        state = {}
        for path in sorted(self.folder.rglob("*")):
            kind = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(kind.st_mode) else b""
            when = () if stat.S_ISDIR(kind.st_mode) else (kind.st_mtime_ns, kind.st_nlink)
            state[str(path)] = (kind.st_mode, content, *when)
        return state

    def _settings_now(self) -> dict[str, object]:
        found: dict[str, object] = {
            "the host's name": socket.gethostname(),
            "its cores": sorted(Path().glob("core*")),
        }
        with contextlib.suppress(OSError):
            found["core_pattern"] = Path("/proc/sys/kernel/core_pattern").read_text()
        with contextlib.suppress(OSError):
            for who, pid in (("victim", self.victim.pid), ("judge", os.getpid())):
                found[f"the {who}'s priority"] = os.getpriority(os.PRIO_PROCESS, pid)
                found[f"the {who}'s scheduling"] = os.sched_getscheduler(pid)
                found[f"the {who}'s processors"] = sorted(os.sched_getaffinity(pid))
                found[f"the {who}'s core limit"] = resource.prlimit(pid, resource.RLIMIT_CORE)
                adjusted = Path(f"/proc/{pid}/oom_score_adj").read_text()
                found[f"the {who}'s oom_score_adj"] = adjusted
                found[f"the {who} is traced or stopped"] = state_of(pid) in ("T", "t")
        return found

    def _secrets_in(self, data: bytes) -> list[str]:
        return [name for name, secret in self.secrets.items() if shows(data, secret)]

    @property
    def _ipc_key(self) -> int:
        return int(self.tag[3:], 16) & 0x3FFFFFFF | 1

    def _trace_files(self) -> list[Path]:
        """Files with the tag in their name, in folders that programs often can write."""
        roots = {Path(name) for name in ("/dev/shm", "/var/tmp", "/run", "/run/lock", "/var/lock")}
        roots |= {Path(tempfile.gettempdir()), Path("/tmp"), Path.cwd(), Path.home()}
        roots |= {Path(name) for name in SYSTEM_FOLDERS}
        found = {path for root in roots for path in tagged(root, self.tag)}
        for root in (Path(tempfile.gettempdir()), Path("/dev/shm")):
            found.update(path for below in folders_of(root) for path in tagged(below, self.tag))
        return sorted(found)

    def _traces(self) -> list[str]:
        found = [f"{path} was left" for path in self._trace_files()]
        for kind in ("shm", "sem", "msg"):
            if self._ipc_key in sysv_keys(kind):
                found.append(f"an object of System V was left ({kind})")
        if self._queue_exists():
            found.append("a message queue was left")
        with contextlib.suppress(OSError):
            if f"key_{self.tag}" in Path("/proc/keys").read_text():
                found.append("a key was left")
        return found

    def _queue_exists(self) -> bool:
        try:
            os.close(syscall("mq_open", f"mq_{self.tag}".encode(), 0, 0, None))
        except OSError:
            return False
        return True

    def _remove_traces(self) -> None:
        if self._last is None or self._last.name.startswith("leave_"):
            end_all(self.tag)
        for path in self._trace_files():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
        library = ctypes.CDLL(None)
        for kind, remove in (("shm", "shmctl"), ("msg", "msgctl")):
            for number in sysv_keys(kind).get(self._ipc_key, ()):
                getattr(library, remove)(number, 0, None)
        for number in sysv_keys("sem").get(self._ipc_key, ()):
            library.semctl(number, 0, 0)
        with contextlib.suppress(OSError):
            syscall("mq_unlink", f"mq_{self.tag}".encode())
        for ring in (-3, -4, -5):
            with contextlib.suppress(OSError):
                key = syscall("keyctl", 10, ring, b"user", f"key_{self.tag}".encode(), 0)
                syscall("keyctl", 9, key, ring)

    def _forget_key(self) -> None:
        with contextlib.suppress(OSError):
            syscall("keyctl", 9, self._key, -3)


def claims(data: bytes) -> list[str]:
    """The lines of an output that say that something worked."""
    lines = data[: 64 << 20].decode(errors="replace").splitlines()
    return [line.strip()[:200] for line in lines if line.lstrip().startswith("ESCAPED:")]


def shows(data: bytes, secret: str) -> bool:
    """Whether a secret is in an output as it is, backwards, in hexadecimal or in base 64."""
    plain = secret.encode()
    forms = [plain, plain[::-1], plain.hex().encode(), base64.b64encode(plain).rstrip(b"=")]
    return any(form in data for form in forms)


def namespace(kind: str) -> str:
    """What /proc calls a namespace of this process."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return "none"


def tagged(folder: Path, tag: str) -> list[Path]:
    """The entries of a folder that have the tag in their name."""
    try:
        return [folder / name for name in os.listdir(folder) if tag in name]
    except OSError:
        return []


def folders_of(root: Path, depth: int = 3, most: int = 300) -> list[Path]:
    """The folders below a root, those near it first; links are not followed."""
    found, level = [], [root]
    for _ in range(depth):
        below = []
        for folder in level:
            if len(found) + len(below) < most:
                with contextlib.suppress(OSError), os.scandir(folder) as entries:
                    below += [Path(e) for e in entries if e.is_dir(follow_symlinks=False)]
        found, level = found + below, below
    return found


def sysv_keys(kind: str) -> dict[int, list[int]]:
    """The objects of System V: numbers by key."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as file:
        for line in list(file)[1:]:
            key, number = line.split()[:2]
            found.setdefault(int(key), []).append(int(number))
    return found


def syscall(name: str, *arguments: object) -> int:
    """A call that Python has no function for."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    number = CALLS[name][os.uname().machine != "x86_64"]
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = library.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def add_key(name: str, secret: str) -> int:
    """A key in the keyring of this thread's session; 0 where there are no keys."""
    try:
        return syscall("add_key", b"user", name.encode(), secret.encode(), len(secret), -3)
    except OSError:
        return 0
