"""The worker extension of vLLM servers (`--worker-extension-cls`). vLLM imports this module in each
worker process."""

from __future__ import annotations

import os
import signal
import threading
import time

from rloo_weights import GUARDED, VersionLoader

_PAUSE_SECONDS = 1.0


class WorkerExtension(VersionLoader):
    """Loads versions of the weights."""


def end_with_guard() -> None:
    """Kill the server's processes when the guard process, the leader of their process group, is
    gone and nobody has stopped the server. vLLM's engine process does not notice that the API
    server was killed, for example by a program that frees memory. The engine would then keep its
    memory forever."""
    # The number of the leader is not used again while its group has a process. A leader that has
    # ended and was not waited for still exists: its parent will stop the server.
    leader = os.getpgid(0)
    while True:
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            os.killpg(leader, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


if os.environ.get(GUARDED):
    threading.Thread(target=end_with_guard, daemon=True).start()
