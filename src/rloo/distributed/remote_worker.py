"""A worker that is started outside of the run: `rloo worker KIND FOLDER`.

The worker connects to the run's main process and serves it until the connection ends. The worker
then connects again, since the main process may have been restarted.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rloo.distributed.child_process import ChildProcess
from rloo.distributed.worker_process import start
from rloo.distributed.worker_registry import FILE, KINDS, REFUSALS, authenticate, unhurried, watch

_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 10.0


def work(kind: str, folder: Path, *, patience: float) -> int:
    """Serve the run in `folder` until the run is over. Returns the number of connections. Raises
    TimeoutError if no connection to a run of this folder is possible for `patience` seconds."""
    before = _read(folder / FILE).get("secret")  # the secret of an earlier run that is over
    served, deadline = 0, time.monotonic() + patience
    while time.monotonic() < deadline:
        known = _read(folder / FILE)
        if known.get("over") and known.get("secret") != before:
            return served
        connection = None if known.get("over", True) else _go_to(known, kind)
        if connection is None:
            time.sleep(_POLL_SECONDS)
            continue
        before, served = None, served + 1
        _serve(kind, connection)
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


def _go_to(known: dict[str, Any], kind: str) -> Connection | None:
    connected = None
    try:
        address = known["host"], known["port"]
        connected = socket.create_connection(address, _CONNECT_SECONDS)
        watch(connected)
        connection = authenticate(connected, known["secret"], first=False)
        hello = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}
        connection.send_bytes(json.dumps(hello).encode())
        unhurried(connection)
    except REFUSALS:  # the main process is gone, or another process answered
        if connected is not None:
            connected.close()
        return None
    return connection


def _serve(kind: str, connection: Connection) -> None:
    """Start a process that answers the calls until the process or the connection ends."""
    process = start(KINDS[kind], connection.fileno())
    try:
        _wait(process, connection)
    finally:
        process.end()
        connection.close()


def _wait(process: ChildProcess, connection: Connection) -> None:
    """Wait until the process has ended or the run has closed the connection. During a computation
    the process itself does not notice a closed connection."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    while process.poll() is None:
        if poll.poll(1000 * _POLL_SECONDS):
            process.wait(_POLL_SECONDS)  # the process may have noticed and be ending
            return
