"""Lists the processes of a run in a file for `rloo status`, and reacts to the stop file that
`rloo stop` writes. Both commands need only the run's folder, on any machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo.trainer.run_lock import BEAT

if TYPE_CHECKING:
    from rloo.algorithm.state import TrainerComponents

# The run writes MEMBERS. `rloo stop` creates STOP to make the run save and end.
MEMBERS, STOP = ".members.json", ".stop"


@contextmanager
def heartbeat(parts: TrainerComponents) -> Iterator[None]:
    """In this block, accept remote workers, write the members file, and treat a stop file like
    SIGTERM. The run must own the folder. Collective."""
    world, folder = parts.world, parts.monitor.output_dir
    place = {"host": socket.gethostname(), "pid": os.getpid()}
    here = {"role": "trainer", "number": world.rank, **place}
    ranks = world.all_gather_object(here)
    if not world.is_main:
        yield
        return
    if world.worker_registry is not None:
        world.worker_registry.open()
    over = threading.Event()
    known = {"max_steps": parts.monitor.max_steps, "ranks": ranks}
    thread = threading.Thread(target=_watch, args=(parts, folder, known, over), daemon=True)
    thread.start()
    try:
        yield
        if world.worker_registry is not None:
            world.worker_registry.finish()
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            (folder / STOP).unlink(missing_ok=True)
            (folder / MEMBERS).unlink(missing_ok=True)


def _watch(
    parts: TrainerComponents, folder: Path, known: dict[str, Any], over: threading.Event
) -> None:
    hub, before, asked = parts.world.worker_registry, "", False
    while True:
        now = json.dumps(known | {"workers": hub.members() if hub else []})
        with suppress(OSError):  # if the disk is full, training raises an error
            if now != before:
                _replace(folder / MEMBERS, now)
                before = now
            # In a script's thread no handler is installed, and the signal would end the process.
            heard = callable(signal.getsignal(signal.SIGTERM))
            if heard and not asked and (folder / STOP).exists():
                asked = True
                os.kill(os.getpid(), signal.SIGTERM)
        if over.wait(BEAT / 5):
            return


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")  # a leftover is overwritten by the next write
    temporary.write_text(text)
    temporary.rename(path)
