"""What a host has for attacks: sockets that hear, a process to be harmed, and who counts."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

VICTIM = """
import ctypes, os, signal, sys
secret = os.environ["RLOO_TEST_TOKEN"].encode()
heard = []
for name in ("URG", "USR1", "USR2", "TERM", "HUP", "INT", "WINCH", "CONT", "ALRM", "IO"):
    number = getattr(signal, "SIG" + name)
    signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
where = ctypes.cast(ctypes.c_char_p(secret), ctypes.c_void_p).value
print(where, flush=True)
for _ in sys.stdin:
    print(*heard, flush=True)
    heard.clear()
"""


class Listeners:
    """Sockets of all kinds; `heard` says who connected and what arrived."""

    def __init__(self, folder: Path, name: str, banner: str) -> None:
        self.heard: list[str] = []
        self._banner = banner.encode()
        self._selector = selectors.DefaultSelector()
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        self.port = self._listen("TCP on loopback", socket.AF_INET, stream, ("127.0.0.1", 0))[1]
        self.udp_port = self._listen("UDP", socket.AF_INET, datagram, ("127.0.0.1", 0))[1]
        for kind, port in ((stream, self.port), (datagram, self.udp_port)):
            with contextlib.suppress(OSError):
                self._listen("IPv6", socket.AF_INET6, kind, ("::1", port))
        self.unix_path, self.unix_datagram = str(folder / "stream"), str(folder / "datagram")
        self._listen("a socket with a path", socket.AF_UNIX, stream, self.unix_path)
        self._listen("a datagram socket with a path", socket.AF_UNIX, datagram, self.unix_datagram)
        for path in (self.unix_path, self.unix_datagram):
            os.chmod(path, 0o777)
        self._listen("an abstract socket", socket.AF_UNIX, stream, "\0" + name)
        self.lan, self.lan_port = own_address(), self.port
        with contextlib.suppress(OSError):
            if self.lan != "127.0.0.1":
                where = (self.lan, 0)
                self.lan_port = self._listen("its address", socket.AF_INET, stream, where)[1]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _listen(self, name, family, kind, address):
        heard = socket.socket(family, kind)
        try:
            if family == socket.AF_INET6:
                heard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            heard.bind(address)
            if kind == socket.SOCK_STREAM:
                heard.listen()
        except OSError:
            heard.close()
            raise
        heard.setblocking(False)
        self._selector.register(heard, selectors.EVENT_READ, (name, kind))
        return heard.getsockname()

    def _serve(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(0.02):
                name, kind = key.data
                with contextlib.suppress(OSError):
                    if kind == socket.SOCK_DGRAM:
                        self.heard.append(f"{name} heard {key.fileobj.recv(1000)[:40]!r}")
                        continue
                    connection, _ = key.fileobj.accept()
                    self.heard.append(f"{name} was connected to")
                    with connection:
                        connection.settimeout(0.2)
                        connection.sendall(self._banner)

    def close(self) -> None:
        """Ends the thread and closes the sockets."""
        self._ended.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()


class Victim:
    """A process that notes the signals it gets and lets itself be traced by anyone."""

    def __init__(self, secret: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", VICTIM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # so that nothing is left to be written to a dead process
            env={"RLOO_TEST_TOKEN": secret},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.address = int(self._process.stdout.readline())

    def harm(self, seconds: float = 0.5) -> list[str]:
        """What signals it got since the last question; whether it is stopped or dead."""
        found = []
        if state_of(self.pid) in ("T", "t"):
            found.append("the victim is stopped")
            os.kill(self.pid, signal.SIGCONT)
        timer = threading.Timer(seconds + 2, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(b"\n")
            got = self._process.stdout.readline()
        except OSError:
            got = b""
        timer.cancel()
        if not got:
            self._process.kill()
            self._process.wait()
            found.append("the victim is dead")
        elif names := sorted(set(got.decode().split()) - ({"SIGCONT"} if found else set())):
            found.append(f"the victim got {' '.join(names)}")
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Watcher:
    """The most processes and memory that the processes of one name had together."""

    def __init__(self, name: str, period: float = 0.05) -> None:
        self.processes = self.bytes = 0
        self._name, self._period, self._ended = name, period, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            found = [status_of(pid) for pid in pids_named(self._name)]
            kilobytes = sum(
                int(status.get(key, "0").split()[0])
                for status in found
                for key in ("RssAnon", "RssShmem")
            )
            self.bytes = max(self.bytes, kilobytes << 10)
            self.processes = max(self.processes, sum(int(s.get("Threads", 0)) for s in found))

    def close(self) -> None:
        """Stops counting."""
        self._ended.set()
        self._thread.join()


def own_address() -> str:
    """An address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as question, contextlib.suppress(OSError):
        question.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses the address
        return question.getsockname()[0]
    return "127.0.0.1"


def status_of(pid: int) -> dict[str, str]:
    """/proc/<pid>/status; nothing when the process has gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError:
        return {}


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), t (traced), Z, or nothing when it has gone."""
    return status_of(pid).get("State", "").strip()[:1]


def pids_named(name: str) -> list[int]:
    """The processes of a name that have not ended; the newest first, for they may be short."""
    wanted, found = f"{name}\n", []
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal())[::-1]:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
            if file.read() == wanted and state_of(pid) not in ("Z", "X", ""):
                found.append(pid)
    return found


def seen(name: str, looks: int = 3) -> list[int]:
    """The processes of a name, by several looks: one that forks and ends can hide from a look."""
    for _ in range(looks):
        if there := pids_named(name):
            return there
        time.sleep(0.005)
    return []


def wait_for_end(name: str, seconds: float) -> list[int]:
    """The processes of a name that are still there after `seconds`."""
    end = time.monotonic() + seconds
    while (there := seen(name)) and time.monotonic() < end:
        time.sleep(0.02)
    return there


def end_all(name: str, seconds: float = 2.0) -> None:
    """Kills the processes of a name until none is left, for they may fork meanwhile."""
    end = time.monotonic() + seconds
    while (there := seen(name)) and time.monotonic() < end:
        for pid in there:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
