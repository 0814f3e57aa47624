"""Workers that are started outside of the run, on any machine, and connect to the main process.

A registry listens on a port. It writes its address and a secret to a file on a shared file system.
Only the user of the run can read the file. Both ends prove that they know the secret (HMAC).
Messages are bytes without encryption, as between ranks.
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

# The function that serves each kind of worker.
KINDS = {"sample": "rloo.engines.engine_worker:serve", "score": "rloo.rewards.reward_workers:serve"}
# The file in a run's folder with the registry's address and secret.
FILE = ".workers.json"
HELLO_BYTES = 4096
# Errors if the other end is gone or fails authentication. (The AssertionError is for the prefix of
# a message, which multiprocessing asserts.)
REFUSALS = (
    OSError, EOFError, ValueError, KeyError, TypeError, AuthenticationError, AssertionError,
)  # fmt: skip
HELLO_SECONDS = 10.0
# Seconds without an answer after which the system closes a connection to a machine that is gone.
_SILENCE_SECONDS = 60


class WorkerRegistry:
    """Accepts workers. After `open` the registry listens on `host`, and its address is in
    `folder`."""

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
        """Start to listen, once. Raises OSError if it is impossible to listen on `host` or to write
        the file."""
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
        """Wait for a free worker of this kind, and return it. Raises WorkerDied after `seconds`,
        and if the registry is closed."""
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
        """The connected workers: kind, host, process id, and time of connection."""
        with self._changed:
            for worker in [w for w in self._members if not w.is_there()]:
                self._part(worker)
            return [worker.hello.shown() for worker in self._members]

    def finish(self) -> None:
        """Mark the run as over. After `close`, workers of such a run end. Workers of other runs
        connect again to a restarted main process."""
        self._over = True

    def close(self) -> None:
        """Disconnect all workers and stop listening; may be repeated."""
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
            except OSError:  # the listener is closed, or the worker is gone already
                time.sleep(0.0 if self._closed else 0.1)
                continue
            # A thread accepts the worker, so that a silent connection does not delay others.
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
    """The first message of a worker, and the time of its connection."""

    kind: str
    host: str
    pid: int
    since: float

    def shown(self) -> dict[str, Any]:
        """The registration as JSON values."""
        return {"role": self.kind, "host": self.host, "pid": self.pid, "since": self.since}


class RemoteWorker(Worker):
    """A worker that is started outside of the run. After `end` its process connects again, as a new
    worker."""

    def __init__(self, connection: Connection, hello: Registration) -> None:
        super().__init__(f"that {hello.kind}s on {hello.host}", connection, b"")
        self.hello = hello
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._ended = threading.Lock()

    @property
    def pid(self) -> int:
        """The process id on the worker's machine."""
        return self.hello.pid

    def hired_as(self, name: str, setup: bytes) -> None:
        """Set the worker's name, and the bytes `setup`, which are sent with the first call."""
        self.name, self._setup = f"{name} (process {self.pid} on {self.hello.host})", setup

    def is_there(self) -> bool:
        """Whether the connection is open, as far as this process knows. Not for use during a
        call."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def kill(self) -> None:
        """See `Worker`. The process ends with its connection."""
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
    """A worker of one of the KINDS: from the registry `hub` (see `WorkerRegistry.acquire`), or a
    process that this call starts if `hub` is None."""
    name = f"that {kind}s"
    return (
        LocalWorker(name, KINDS[kind], setup)
        if hub is None
        else hub.acquire(kind, name, setup, seconds)
    )


def authenticate(connected: socket.socket, secret: str, *, first: bool) -> Connection:
    """Return the connection over a socket, after both ends have proved that they know the secret.
    The end with `first` sends the first challenge. Raises AuthenticationError, OSError or EOFError,
    also after HELLO_SECONDS without data. Takes ownership of the socket."""
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
    """Remove the timeouts of a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, direction, struct.pack("ll", 0, 0))


def watch(connected: socket.socket) -> None:
    """Turn on TCP keepalive, so that the system detects a machine that is gone."""
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
