"""A worker that is started outside of the run: `rloo worker KIND FOLDER`.

The worker connects to the run's main process and serves it until the connection ends. The worker
then connects again, since the main process may have been restarted. This process has the
connection. A child process computes, so that a computation never delays the end of the worker.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from rloo.distributed.remote_pool import KINDS
from rloo.distributed.worker_process import start
from rloo.distributed.worker_registry import FILE, VERSIONS
from rloo.distributed.worker_server import (
    ANSWER,
    HELLO,
    HELLO_SECONDS,
    LEAVE,
    SILENCE_SECONDS,
    Socket,
    keep_alive,
)  # fmt: skip

_POLL_SECONDS = 0.5


def work(kind: str, folder: Path, *, patience: float) -> int:
    """Serve the run in `folder` until the run is over. Returns the number of connections. Raises
    TimeoutError if no connection to a run of this folder is possible for `patience` seconds.
    Raises ValueError if the run has another version of rloo or Python."""
    before = _read(folder / FILE).get("secret")  # the secret of an earlier run that is over
    served, deadline = 0, time.monotonic() + patience
    while time.monotonic() < deadline:
        known = _read(folder / FILE)
        if known.get("over") and known.get("secret") != before:
            return served
        connection = None if known.get("over", True) else _connect(known)
        if connection is None:
            time.sleep(_POLL_SECONDS)
            continue
        with connection:
            if (theirs := known.get("versions")) != VERSIONS:
                raise ValueError(
                    f"this worker has {_show(VERSIONS)}, and the run in {folder} has "
                    f"{_show(theirs)}; both need the same versions"
                )
            before, served = None, served + 1
            connection.serve(kind)
        deadline = time.monotonic() + patience
    raise TimeoutError(
        f"no run has listened in {folder} for {patience:g} s; a run that hires workers has "
        "async_kwargs.remote_workers set, and its output_dir is this folder (--patience)"
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):  # the file does not exist yet
        return {}
    return known if isinstance(known, dict) else {}


def _show(versions: Any) -> str:
    return json.dumps(versions).translate(str.maketrans("", "", '{}":'))


def _connect(known: dict[str, Any]) -> _Connection | None:
    """A connection to the run; None if its process is gone, or another process answers."""
    try:
        connection = _Connection(known)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, zmq.ZMQError):
        return None  # the file is damaged
    if connection.is_accepted():
        return connection
    connection.close()
    return None


class _Connection:
    """A connection to the run's main process."""

    def __init__(self, known: dict[str, Any]) -> None:
        address = f"tcp://{known['host']}:{int(known['port'])}"
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        try:
            self._socket: Socket = self._context.socket(zmq.DEALER)
            keep_alive(self._socket, SILENCE_SECONDS)
            self._socket.reconnect_ivl = -1  # a new connection is a new worker
            self._socket.sndtimeo = 0  # without a connection a message cannot be sent
            self._socket.curve_serverkey = known["public"].encode()
            self._socket.curve_secretkey = known["secret"].encode()
            self._socket.curve_publickey = zmq.curve_public(known["secret"].encode())
            self._events = self._socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
            )
            self._socket.connect(address)
        except BaseException:
            self._context.destroy()
            raise

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._context.destroy()

    def is_accepted(self) -> bool:
        """Whether both ends have proved that they know the keys."""
        if not self._events.poll(int(1000 * HELLO_SECONDS)):
            return False
        return bool(recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def serve(self, kind: str) -> None:
        """Answer the calls until this connection or the process that computes ends."""
        child = _Child(kind)
        try:
            hello = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}
            self._socket.send_multipart([HELLO, json.dumps(hello).encode()])
            poller = zmq.Poller()
            for each in (self._socket, self._events, child.answered):
                poller.register(each, zmq.POLLIN)
            while child.process.poll() is None:
                ready = dict(poller.poll(int(1000 * _POLL_SECONDS)))
                if self._events in ready:
                    return
                if self._socket in ready:
                    word, *messages = self._socket.recv_multipart()
                    if word == LEAVE:
                        return
                    child.call(messages)
                if child.answered.fileno() in ready:
                    if (answer := child.answer()) is None:
                        return
                    self._socket.send_multipart([ANSWER, answer])
        except zmq.Again:  # the connection has just ended
            return
        finally:
            child.end()


class _Child:
    """The process that computes. A call is made in a thread, since writing to a stopped process
    blocks."""

    def __init__(self, kind: str) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self.process = start(KINDS[kind], theirs.fileno())
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answered, self._wakes = socket.socketpair()
        self._thread: threading.Thread | None = None

    def call(self, messages: list[bytes]) -> None:
        """Send messages; the process answers the last one."""
        self._thread = threading.Thread(target=self._call, args=(messages,), daemon=True)
        self._thread.start()

    def answer(self) -> bytes | None:
        """The answer, when `answered` is readable; None if the process is gone."""
        self.answered.recv(1)
        return self._answers.get_nowait()

    def end(self) -> None:
        """End the process."""
        self.process.end()
        if self._thread is not None:
            self._thread.join(10.0)
        self._connection.close()
        self.answered.close()
        self._wakes.close()

    def _call(self, messages: list[bytes]) -> None:
        try:
            for message in messages:
                self._connection.send_bytes(message)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError):
            answer = None
        self._answers.put(answer)
        self._wakes.send(b".")
