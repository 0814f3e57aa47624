"""Termination signals in every phase of a run, on a separate terminal."""

from __future__ import annotations

import contextlib
import importlib
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.harness import Rig
from benchmarks.chaos.processes import DEADLINE, Ended, as_from_a_shell, command, finish, start
from benchmarks.chaos.results import Trial
from rloo.trainer.checkpoint import find_checkpoint

FIGURE = (
    "signals, 6 kinds in 6 phases on a terminal: checkpoint within 30 s, identical end, status "
    "128 + signal, terminal restored, no child"
)
KINDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
GRACE = 30.0
STARTING = "starting"
# Phase -> (module or class, function, number of the call; steps that the checkpoint must have).
PHASES: dict[str, tuple[str, str, int, int]] = {
    STARTING: ("rloo.trainer.trainer", "obtain_model", 1, 0),
    "sampling": ("rloo.engines.in_process:InProcessEngine", "sample", 9, 3),
    "reward": ("rloo.rewards.reward_set:RewardSet", "call", 8, 3),
    "update": ("rloo.model.optimizer_step:PolicyOptimizer", "backward", 4, 3),
    "saving": ("rloo.model.save_load:ModelFiles", "save_checkpoint", 2, 4),
    "evaluating": ("rloo.rewards.reward_set:RewardSet", "call", 5, 2),
}


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Every signal in every phase."""
    found = [
        Trial(f"{kind} {phase}", "full", partial(stop, rig, kind, phase))
        for phase in PHASES
        for kind in KINDS
    ]
    # A smaller count uses as many different phases and signals as possible.
    return [found[(seed + 7 * n) % len(found)] for n in range(count)] if count else found


def stop(rig: Rig, kind: str, phase: str) -> str:
    """Send a signal in a phase, check how the run ends, and resume it."""
    number = getattr(signal, kind)
    where, name, call, step = PHASES[phase]
    with rig.folder() as folder:
        sent = folder / "sent"

        def prepare() -> None:
            trip(where, name, call, lambda: _send(number, sent))

        options = {"disable_tqdm": False}
        action = command(rig.arguments("full", folder, **options), prepare)
        ended, before, after = on_terminal(action, folder / "log")
        if not sent.exists():
            return f"was not hit: status {ended.status}: {ended.output[-300:]}"
        wrong = []
        if ended.status != 128 + number:
            wrong.append(f"status {ended.status}: {ended.output[-300:]}")
        if (late := time.time() - sent.stat().st_mtime) > GRACE:
            wrong.append(f"{late:.0f} s after the signal")
        if before != after:
            wrong.append(f"the terminal's modes: {before} -> {after}")
        if ended.output.rfind("\x1b[?25l") > ended.output.rfind("\x1b[?25h"):
            wrong.append("the cursor is hidden")
        newest, damaged = find_checkpoint(folder / "run")
        found = int(newest.name.split("-")[1]) if newest else 0
        if found != step or damaged:
            wrong.append(f"checkpoint {found}, not {step}; {damaged}")
        if phase == STARTING:
            wrong.append(_at_the_very_start(rig, folder / "real", number))
        if said := rig.goes_on("full", folder):
            wrong.append(said)
        return "; ".join(filter(None, wrong))


def _send(number: int, sent: Path) -> None:
    sent.touch()
    # Ctrl-C reaches all processes of the foreground group.
    os.kill(0 if number == signal.SIGINT else os.getpid(), number)


def _at_the_very_start(rig: Rig, folder: Path, number: int) -> str:
    """Stop the real command while it is importing. It must not print a traceback."""
    folder.mkdir()
    given = [sys.executable, "-m", "rloo.cli", *rig.arguments("full", folder)]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=as_from_a_shell
    ) as process:
        time.sleep(1.0 + 0.4 * number % 3)
        process.send_signal(number)
        _, said = process.communicate(timeout=DEADLINE)
    shutil.rmtree(folder)
    if process.returncode not in (128 + number, -number):
        return f"at the very start: status {process.returncode}: {said[-300:]!r}"
    return f"at the very start: {said[-300:]!r}" if b"Traceback" in said else ""


def trip(where: str, name: str, call: int, action: Callable[[], object]) -> None:
    """Execute `action` before call number `call` of a function. `where` is a module or
    `module:class`."""
    module, _, owner = where.partition(":")
    found = importlib.import_module(module)
    target = getattr(found, owner) if owner else found
    original, calls = getattr(target, name), [0]

    def tripped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            action()
        return original(*args, **kwargs)

    setattr(target, name, tripped)


def on_terminal(action: Callable[[], int], log: Path) -> tuple[Ended, list[Any], list[Any]]:
    """As `fork`, on a pseudo-terminal that this process reads. Also returns its modes before and
    after."""
    mine, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    began = time.monotonic()

    def open_terminal() -> int:
        terminal = os.open(os.ttyname(theirs), os.O_RDWR)  # becomes its controlling one
        os.dup2(terminal, 0)
        return terminal

    process = start(action, open_terminal)
    text, status = b"", None
    while time.monotonic() - began < DEADLINE and status is None:
        if select.select([mine], [], [], 0.02)[0]:
            text += os.read(mine, 65536)
            continue
        done, how = os.waitpid(process, os.WNOHANG)
        status = os.waitstatus_to_exitcode(how) if done else None
    after = termios.tcgetattr(theirs)
    for descriptor in (mine, theirs):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    log.write_bytes(text)
    return finish(process, status, time.monotonic() - began, log), before, after
