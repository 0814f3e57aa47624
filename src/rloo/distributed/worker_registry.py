"""Workers that are started outside of the run, on any machine, and connect to the main process.

A registry listens on a port with ZeroMQ. One thread serves all workers. The registry writes its
address and keys to a file on a shared file system. Only the user of the run can read the file. Both
ends prove that they know the keys, and messages are encrypted (CURVE). ZeroMQ's heartbeat detects a
worker that is frozen, or whose machine is gone.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

import rloo
from rloo.distributed.remote_pool import RemotePool
from rloo.distributed.worker_server import SILENCE_SECONDS, WorkerServer

# The file in a run's folder with the registry's address and keys.
FILE = ".workers.json"
# A worker must have the same versions as the run.
VERSIONS = {"rloo": rloo.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}


class WorkerRegistry:
    """Accepts workers. After `open` the registry listens on `host`, and its address is in
    `folder`."""

    def __init__(self, folder: Path, host: str, silence: float = SILENCE_SECONDS) -> None:
        self._file, self._host = folder / FILE, host
        self._public, self._private = zmq.curve_keypair()
        self._worker_public, self._worker_private = zmq.curve_keypair()
        self._server = WorkerServer(self._private, self._worker_public, silence)
        self._port: int | None = None
        self._closed = self._over = False
        self._lock = threading.Lock()
        atexit.register(self.close)

    def open(self) -> None:
        """Start to listen, once. Raises OSError if it is impossible to listen on `host` or to write
        the file."""
        if self._port is None:
            try:
                self._port = self._server.listen(self._host)
            except (OSError, zmq.ZMQError) as error:
                raise OSError(
                    f"workers cannot come to {self._host}, the address of the main process: "
                    f"{error.strerror} (MASTER_ADDR)"
                ) from error
            self._write(self._port, over=False)

    def pool(self, kind: str, size: int, setup: bytes, seconds: float) -> RemotePool:
        """See `Registry`."""
        return self._server.pool(kind, size, setup, seconds)

    def members(self) -> list[dict[str, Any]]:
        """See `Registry`."""
        return self._server.members()

    def finish(self) -> None:
        """Mark the run as over. After `close`, workers of such a run end. Workers of other runs
        connect again to a restarted main process."""
        self._over = True

    def close(self) -> None:
        """Disconnect all workers and stop listening; may be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._port is not None:
            with suppress(OSError):
                self._write(self._port, over=self._over)
        self._server.close()
        atexit.unregister(self.close)

    def _write(self, port: int, *, over: bool) -> None:
        known = {
            "host": self._host, "port": port, "public": self._public.decode(),
            "secret": self._worker_private.decode(), "versions": VERSIONS, "over": over,
        }  # fmt: skip
        temporary = self._file.with_name(f"{self._file.name}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump(known, file)
        temporary.rename(self._file)
