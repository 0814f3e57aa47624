"""Workers that others have started, on this machine or on another: they come to us, and are hired.

A hub listens at an address that it writes, with a secret, to a file that its user alone can read
and all machines see. Who comes must know the secret, and so must we (HMAC, both ways); what is
sent afterwards is in the clear, as between the ranks. Only bytes travel.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from rloo.distributed.worker_process import LocalWorker, Worker, WorkerDied

# What answers the calls of each kind of worker.
KINDS = {"sample": "rloo.engines.engine_worker:serve", "score": "rloo.rewards.reward_workers:serve"}
# In the folder of a run: where its workers come to.
FILE = ".workers.json"
HELLO_BYTES = 4096
# What is raised where the other end is gone, or not who it should be. (multiprocessing asserts what
# a message begins with.)
REFUSALS = (
    OSError, EOFError, ValueError, KeyError, TypeError, AuthenticationError, AssertionError,
)  # fmt: skip
HELLO_SECONDS = 10.0
# A machine that is gone answers nothing: after so many seconds of that a connection is closed.
_SILENCE_SECONDS = 60


class WorkerRegistry:
    """Once it is open, listens on `host`, and says so in `folder`."""

    def __init__(self, folder: Path, host: str) -> None:
        self._file, self._host = folder / FILE, host
        self._secret = secrets.token_hex(32)
        self._listener: socket.socket | None = None
        self._changed = threading.Condition()
        self._waiting: list[RemoteWorker] = []
        self._members: list[RemoteWorker] = []
        self._closed = self._over = False
        atexit.register(self.close)

    def open(self) -> None:
        """Listen from now on. Raises OSError where it cannot listen on `host`, or write."""
        if self._listener is None:
            try:
                self._listener = socket.create_server((self._host, 0), backlog=1024)
            except OSError as error:
                raise OSError(
                    f"workers cannot come to {self._host}, the address of the main process: "
                    f"{error.strerror} (MASTER_ADDR)"
                ) from error
            self._write(self._listener, over=False)
            threading.Thread(target=self._listen, args=(self._listener,), daemon=True).start()

    def acquire(self, kind: str, name: str, setup: bytes, seconds: float) -> RemoteWorker:
        """A worker of this kind that has come and is free; waits for one. Raises WorkerDied after
        so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._closed and time.monotonic() < deadline:
                for worker in [w for w in self._waiting if w.hello.kind == kind]:
                    self._waiting.remove(worker)
                    if worker.is_there():
                        worker.hired_as(name, setup)
                        return worker
                    self._part(worker)
                self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
        if self._closed:
            raise WorkerDied(name, "is not needed any more")
        raise WorkerDied(name, f"has not come within {seconds:g} s (rloo worker {kind} FOLDER)")

    def members(self) -> list[dict[str, Any]]:
        """Who is connected: kind, host, process, and since when."""
        with self._changed:
            for worker in [w for w in self._members if not w.is_there()]:
                self._part(worker)
            return [worker.hello.shown() for worker in self._members]

    def finish(self) -> None:
        """The run is over: from its end on workers have nothing to wait for. Else they come again,
        when the main process has been started again."""
        self._over = True

    def close(self) -> None:
        """Part with all workers; also twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            members = list(self._members)
        if self._listener is not None:
            with suppress(OSError):
                self._write(self._listener, over=self._over)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for worker in members:
            worker.end()

    def _write(self, listener: socket.socket, *, over: bool) -> None:
        address = {"host": self._host, "port": listener.getsockname()[1]}
        known = {**address, "secret": self._secret, "over": over}
        temporary = self._file.with_name(f"{self._file.name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(known, file)
        temporary.rename(self._file)

    def _listen(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                accepted, _ = listener.accept()
            except OSError:  # closed, or somebody who has left already
                time.sleep(0.0 if self._closed else 0.1)
                continue
            # So that one who says nothing keeps nobody waiting.
            threading.Thread(target=self._welcome, args=(accepted,), daemon=True).start()

    def _welcome(self, accepted: socket.socket) -> None:
        try:
            watch(accepted)
            connection = authenticate(accepted, self._secret, first=True)
            said = json.loads(connection.recv_bytes(HELLO_BYTES))
            hello = Registration(
                str(said["kind"]), str(said["host"]), int(said["pid"]), time.time()
            )
            worker = RemoteWorker(connection, hello)
            unhurried(connection)
        except REFUSALS:
            accepted.close()
            return
        with self._changed:
            self._members.append(worker)
            self._waiting.append(worker)
            self._changed.notify_all()
        if self._closed:
            worker.end()

    def _part(self, worker: RemoteWorker) -> None:
        worker.end()
        self._members.remove(worker)
        if worker in self._waiting:
            self._waiting.remove(worker)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker says when it comes, and when it came."""

    kind: str
    host: str
    pid: int
    since: float

    def shown(self) -> dict[str, Any]:
        """As JSON values."""
        return {"role": self.kind, "host": self.host, "pid": self.pid, "since": self.since}


class RemoteWorker(Worker):
    """A worker that somebody else has started. Ended, it comes back as another one."""

    def __init__(self, connection: Connection, hello: Registration) -> None:
        super().__init__(f"that {hello.kind}s on {hello.host}", connection, b"")
        self.hello = hello
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._ended = threading.Lock()

    @property
    def pid(self) -> int:
        """The process's number, on its own machine."""
        return self.hello.pid

    def hired_as(self, name: str, setup: bytes) -> None:
        """Give it a name and tell it what to do, with the first call."""
        self.name, self._setup = f"{name} (process {self.pid} on {self.hello.host})", setup

    def is_there(self) -> bool:
        """Whether the other end is open, as far as is known here. Not while it is asked."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        """See `Worker`: it ends when its connection does."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """See `Worker`."""
        self.kill()
        if self._ended.acquire(blocking=False):
            self._socket.close()
            with suppress(OSError):
                self._connection.close()

    def _status(self) -> None:
        return None


def acquire_worker(kind: str, setup: bytes, hub: WorkerRegistry | None, seconds: float) -> Worker:
    """A worker of one of the KINDS: from a hub, waited for as long as `WorkerRegistry.acquire`
    does, or else one that is started here."""
    name = f"that {kind}s"
    return (
        LocalWorker(name, KINDS[kind], setup)
        if hub is None
        else hub.acquire(kind, name, setup, seconds)
    )


def authenticate(connected: socket.socket, secret: str, *, first: bool) -> Connection:
    """The connection over a socket, once both ends have shown that they know the secret; `first`
    is the one that asks first. Raises AuthenticationError, OSError or EOFError, also for one that
    is silent for HELLO_SECONDS. The socket is taken over."""
    seconds = struct.pack("ll", int(HELLO_SECONDS), 0)
    connected.setblocking(True)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, direction, seconds)
    connection = Connection(connected.detach())
    try:
        for step in (deliver_challenge, answer_challenge)[:: 1 if first else -1]:
            step(connection, secret.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def unhurried(connection: Connection) -> None:
    """From now on what is read may take any time."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", 0, 0))


def watch(connected: socket.socket) -> None:
    """Have the system find out when the machine at the other end is gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENCE_SECONDS // 2),
        ("TCP_KEEPINTVL", _SILENCE_SECONDS // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_SECONDS),
    ):
        if hasattr(socket, name):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
