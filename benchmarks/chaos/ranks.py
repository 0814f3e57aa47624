"""kill -9 of one of several processes at random moments, with and without --max_restarts."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.harness import RANKS, Rig
from benchmarks.chaos.processes import DEADLINE, Ended, children_of, finish, start, to_file, wait
from benchmarks.chaos.results import Trial

FIGURE = (
    "kill -9 of one of 2 or 3 ranks at a random moment: all end within 60 s, no process is left, "
    "identical end by the same command, or with --max_restarts by itself"
)
PROMISED = 40
# Every tenth trial uses the real command line. Half of the trials use --max_restarts.
FORKED = ("2 ranks", "3 ranks", "2 slices", "2 servers")
REAL, EVERY = "2 real ranks", 10
ENDS_WITHIN = 60.0


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Trials in which a random rank is killed after a random share of the run's time. If the run
    restarts automatically, every third trial has two kills."""
    rng = random.Random(seed)
    found = []
    for number in range(count or PROMISED):
        config = REAL if number % EVERY == EVERY - 1 else rng.choice(FORKED)
        again = number % 4 > 1
        kills = [
            (rng.randrange(RANKS[config]["num_processes"]), rng.random())
            for _ in range(2 if again and number % 3 == 0 else 1)
        ]
        said = " and ".join(f"rank {rank} at {share:.4f}" for rank, share in kills)
        name = f"{seed}.{number} {config}, {said}{', starts again' if again else ''}"
        trial = starts_again if again else ends
        found.append(Trial(name, config, partial(trial, rig, config, kills)))
    return found


def ends(rig: Rig, config: str, kills: list[tuple[int, float]]) -> str:
    """Kill a rank, check how the others end, and resume by the same command."""
    ((rank, share),) = kills
    seconds = rig.seconds[config] * share
    for _ in range(20):
        with rig.folder() as folder:
            ended, _ = kill_ranks(rig, config, folder, [(rank, seconds)], within=ENDS_WITHIN)
            if f"rank {rank} was ended by SIGKILL" in ended.output:
                if ended.status != 128 + signal.SIGKILL:
                    return f"status {ended.status}: {ended.output[-400:]}"
                return rig.goes_on(config, folder)
        seconds *= 0.8  # this run was faster than the measured one
    return f"was not hit: status {ended.status}"


def starts_again(rig: Rig, config: str, kills: list[tuple[int, float]]) -> str:
    """Kill ranks of a run that restarts automatically."""
    moments = [(rank, rig.seconds[config] * share) for rank, share in kills]
    for _ in range(20):
        with rig.folder() as folder:
            ended, hit = kill_ranks(rig, config, folder, moments, within=DEADLINE, max_restarts=2)
            if f"rank {moments[0][0]} was ended by SIGKILL" in ended.output:
                # A second kill may have come after the end.
                if ended.status or not 1 <= ended.output.count("the run starts again") <= hit:
                    return f"status {ended.status}: {ended.output[-400:]}"
                return rig.differences(config, folder)
        moments = [(rank, seconds * 0.8) for rank, seconds in moments]
    return f"was not hit: status {ended.status}"


def kill_ranks(
    rig: Rig,
    config: str,
    folder: Path,
    moments: list[tuple[int, float]],
    *,
    within: float,
    max_restarts: int = 0,
) -> tuple[Ended, int]:
    """Start a run, and kill ranks: each of `moments` is a rank and the seconds since the start or
    the previous kill. Returns how the run ended, `within` seconds of the last kill, and the number
    of kills."""
    began, size = time.monotonic(), RANKS[config]["num_processes"]
    options: dict[str, Any] = {"max_restarts": max_restarts}
    if max_restarts:  # a restart must resume without this option
        options["resume_from_checkpoint"] = None
    process = start(rig.action(config, folder, None, **options), to_file(folder / "log"))
    hit, status = 0, None
    for rank, seconds in moments:
        status = wait(process, seconds)
        # Wait for all ranks: the launcher may be starting or restarting them.
        while status is None and len(ranks := children_of(process)) < size:
            status = wait(process, 0.002)
        if status is not None:
            break
        os.kill(ranks[rank], signal.SIGKILL)
        hit += 1
        while status is None and ranks[rank] in children_of(process):
            status = wait(process, 0.002)
    if status is None:
        status = wait(process, within)
    return finish(process, status, time.monotonic() - began, folder / "log"), hit
