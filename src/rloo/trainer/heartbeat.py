"""Who takes part in a run, written for `rloo status`, and what `rloo stop` asks for, both by files:
the folder is all that they need, from whatever machine."""

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

# Written by the run; and by who wants it to save and end.
MEMBERS, STOP = ".members.json", ".stop"


@contextmanager
def heartbeat(parts: TrainerComponents) -> Iterator[None]:
    """In this block, in which the folder is ours, workers may come, others see who is here, and may
    have the run end, as by SIGTERM. A collective."""
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
        with suppress(OSError):  # a full disk: training will tell
            if now != before:
                _replace(folder / MEMBERS, now)
                before = now
            # Where nobody listens, as in a script's thread, it would end the process.
            heard = callable(signal.getsignal(signal.SIGTERM))
            if heard and not asked and (folder / STOP).exists():
                asked = True
                os.kill(os.getpid(), signal.SIGTERM)
        if over.wait(BEAT / 5):
            return


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")  # which the next run, if not this one, replaces
    temporary.write_text(text)
    temporary.rename(path)
