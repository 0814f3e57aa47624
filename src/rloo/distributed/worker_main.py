"""The main function of a worker's process; see `rloo.distributed.worker_process`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from rloo.distributed.signal_numbers import STOP_SIGNALS
from rloo.distributed.user_traceback import of_the_user
from rloo.distributed.worker_process import ANSWER, FAILURE, describe

leave: Callable[[int], NoReturn] = os._exit  # os._exit is replaced while a reward function runs


def main(target: str, channel: int, lifeline: int) -> None:
    """Answer calls over `channel` until the other end closes `channel` or `lifeline`."""
    for name in STOP_SIGNALS:  # a worker ends only with its parent or connection
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    connection = Connection(channel)
    module, _, function = target.partition(":")
    handle = None
    try:
        setup = connection.recv_bytes()
        while True:
            message = connection.recv_bytes()
            try:
                if handle is None:  # the first call reports an error of the setup
                    handle = getattr(importlib.import_module(module), function)(setup)
                said = ANSWER + handle(message)
            except Exception as error:
                said = FAILURE + describe(error, of_the_user(error) or traceback.format_exc())
            connection.send_bytes(said)
    except (EOFError, OSError):  # the caller has closed the connection
        leave(0)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the other end is closed; nothing is ever written
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
