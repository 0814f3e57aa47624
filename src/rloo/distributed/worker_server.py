"""The sockets of a `WorkerRegistry`.

A message of a worker begins with HELLO or ANSWER, a message to a worker with CALL or LEAVE.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rloo.distributed.remote_pool import Registration, RemoteWorker
from rloo.distributed.worker_loop import WorkerLoop

# After HELLO: a registration. After CALL: the setup, with the first call only, and the message.
# After ANSWER: the answer. LEAVE disconnects the worker.
HELLO, CALL, ANSWER, LEAVE = b"hello", b"call", b"answer", b"leave"
# The deadline of a handshake.
HELLO_SECONDS = 10.0
# Seconds without a sign of life after which ZeroMQ closes a connection.
SILENCE_SECONDS = 30.0
# Where ZeroMQ asks for the admission of a client (https://rfc.zeromq.org/spec/27/).
_ADMISSION = "inproc://zeromq.zap.01"

Socket = zmq.Socket[bytes]


class WorkerServer(WorkerLoop):
    """Accepts workers that know the public key of `private` and have the key `admitted`. Runs the
    jobs of the pools in one thread."""

    def __init__(self, private: bytes, admitted: bytes, silence: float) -> None:
        super().__init__()
        self._private, self._admitted, self._silence = private, admitted, silence
        self._listens = threading.Event()
        self._sockets: _Sockets | None = None
        # The workers by the descriptors of their connections; None before the registration.
        self._connected: dict[int, RemoteWorker | None] = {}

    def listen(self, host: str) -> int:
        """Listen on a port of `host`, and return the port. Raises OSError or ZMQError."""
        self._sockets = _Sockets(host, self._private, self._silence)
        self._listens.set()
        self._start()
        return self._sockets.port

    def wake(self) -> None:
        """See `Links`."""
        if self._sockets is not None:
            self._sockets.wake()

    def hint(self, kind: str) -> str:
        """See `Links`."""
        return f"rloo worker {kind} FOLDER"

    def send(self, worker: RemoteWorker, *parts: bytes) -> None:
        """See `Links`."""
        if not self._send(worker.identity, CALL, *parts):
            self._gone.append(worker)

    def _disconnect(self, worker: RemoteWorker) -> None:
        self._send(worker.identity, LEAVE)

    def _communicate(self, seconds: float) -> None:
        if (sockets := self._sockets) is None:
            self._listens.wait(seconds)
            return
        sockets.wait(seconds)
        sockets.admit(self._admitted)
        self._note_connections(sockets)
        while (message := sockets.receive()) is not None:
            self._handle(sockets, *message)

    def _stop(self) -> None:
        if self._sockets is not None:
            self._sockets.close()

    def _note_connections(self, sockets: _Sockets) -> None:
        """Process the opened and closed connections."""
        for descriptor, is_open in sockets.connections():
            if (worker := self._connected.pop(descriptor, None)) is not None:
                self._gone.append(worker)
            if is_open:
                self._connected[descriptor] = None

    def _handle(self, sockets: _Sockets, descriptor: int, identity: bytes, *parts: bytes) -> None:
        worker = self._members.get(identity)
        match parts:
            case [word, answer] if word == ANSWER and worker is not None:
                if worker.jobs is not None:
                    worker.jobs.answered(worker, answer)
            case [word, hello] if word == HELLO and worker is None:
                self._note_connections(sockets)
                if descriptor in self._connected:  # otherwise the worker is gone again
                    self._register(descriptor, identity, hello)
            case _:  # a worker that was given up, or a stranger
                self._send(identity, LEAVE)

    def _register(self, descriptor: int, identity: bytes, hello: bytes) -> None:
        try:
            said = json.loads(hello)
            registration = Registration(
                str(said["kind"]), str(said["host"]), int(said["pid"]), time.time()
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            self._send(identity, LEAVE)
            return
        if (before := self._connected[descriptor]) is not None:
            # A closed connection had the same descriptor, and its last message came after its end.
            self._gone.append(before)
        worker = self._connected[descriptor] = RemoteWorker(identity, registration)
        self._admit(worker)

    def _send(self, identity: bytes, *parts: bytes) -> bool:
        assert self._sockets is not None
        return self._sockets.send(identity, *parts)


class _Sockets:
    """The sockets: for messages, for the admission of clients, for events of connections, and to
    wake the thread."""

    def __init__(self, host: str, private: bytes, silence: float) -> None:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        try:
            # Without an admission every client that knows the public key would be accepted.
            self._admission = self._context.socket(zmq.REP)
            self._admission.bind(_ADMISSION)
            self._router = self._context.socket(zmq.ROUTER)
            keep_alive(self._router, silence)
            self._router.curve_server, self._router.curve_secretkey = True, private
            self._router.router_mandatory, self._router.backlog = True, 1024
            events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
            self._events = self._router.get_monitor_socket(events)
            self.port = int(self._router.bind_to_random_port(f"tcp://{address}"))
        except BaseException:
            self._context.destroy()
            raise
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._is_woken = False
        self._poller = zmq.Poller()
        for each in (self._admission, self._events, self._router):
            self._poller.register(each, zmq.POLLIN)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        """End a wait. Thread-safe."""
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):
                self._wakes.send(b".")

    def wait(self, seconds: float) -> None:
        """Wait for a message, an event or `wake`."""
        self._poller.poll(int(1000 * seconds))
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        self._is_woken = False

    def admit(self, key: bytes) -> None:
        """Answer ZeroMQ's questions whether to admit clients: those with this public key."""
        while (message := _received(self._admission)) is not None:
            version, request, _, _, _, mechanism, *credentials = [part.bytes for part in message]
            known = mechanism == b"CURVE" and credentials == [z85.decode(key)]
            status = [b"200", b"OK"] if known else [b"400", b"this key is not known"]
            self._admission.send_multipart([version, request, *status, b"", b""])

    def connections(self) -> list[tuple[int, bool]]:
        """The descriptors of connections that were opened (True) and closed (False) since the last
        call, in order."""
        found = []
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._events, zmq.DONTWAIT)
                found.append((event["value"], event["event"] == zmq.EVENT_ACCEPTED))
        return found

    def receive(self) -> tuple[Any, ...] | None:
        """The next message: the descriptor of the connection, the identity of the worker, and the
        parts."""
        if (message := _received(self._router)) is None:
            return None
        identity, *parts = message
        descriptor = parts[0].get(zmq.SRCFD) if parts else -1
        return descriptor, identity.bytes, *[part.bytes for part in parts]

    def send(self, identity: bytes, *parts: bytes) -> bool:
        """Send a message; False if the worker is gone."""
        try:
            self._router.send_multipart([identity, *parts], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Close all connections."""
        self._router.disable_monitor()
        self._context.destroy()
        for end in (self._woken, self._wakes):
            end.close()


def keep_alive(connection: Socket, silence: float) -> None:
    """Turn on ZeroMQ's heartbeat, and set the deadline of handshakes."""
    connection.heartbeat_ivl = int(1000 * silence / 6)
    connection.heartbeat_timeout = int(1000 * silence)
    connection.handshake_ivl = int(1000 * HELLO_SECONDS)


def _received(connection: Socket) -> list[zmq.Frame] | None:
    """The next message; None if there is none."""
    try:
        return connection.recv_multipart(zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return None
