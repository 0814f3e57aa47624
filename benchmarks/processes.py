"""Starts a module of this folder in several processes that connect with each other."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_ranks(size: int, module: str, arguments: Sequence[str], timeout: float) -> list[list[Any]]:
    """Run `module` with `arguments` in `size` processes with one thread each. Returns the lines of
    JSON that each process prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-m", module, *arguments]
    ranks = []
    for rank in range(size):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        environment = {**os.environ, **address, **own, "OMP_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a process of {size} has failed")
    return [[json.loads(line) for line in text.splitlines() if line[0] == "["] for text in printed]
