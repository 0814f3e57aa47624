"""kill -9 of the trainer, or of a process that samples or scores concurrently, at random
moments."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from functools import partial
from pathlib import Path

import psutil

from benchmarks.chaos.harness import Rig
from benchmarks.chaos.processes import DEADLINE, Ended, finish, start, to_file, wait
from benchmarks.chaos.results import Trial

FIGURE = (
    "kill -9 of the process that samples, of one that scores (also such that connect by "
    "themselves), of a server, of the trainer, at a random moment: ends by itself, the trainer's "
    "run by the same command, with the groups of an undisturbed run; at max_staleness 0 identical"
)
PROMISED = 60
# Role -> text in the command line of a process with this role.
ROLES = {
    "sampler": "rloo.engines.engine_worker:serve",
    "scorer": "rloo.rewards.reward_workers:serve",
    "server": "fake_vllm_program.py",
    "remote sampler": " worker sample ",
    "remote scorer": " worker score ",
}
KINDS = (
    ("beside", "sampler"), ("beside", "scorer"), ("beside", "trainer"), ("ahead", "sampler"),
    ("ahead", "scorer"), ("ahead", "trainer"), ("served", "server"), ("served", "trainer"),
    ("remote", "remote sampler"), ("remote", "remote scorer"), ("2 servers", "server"),
    ("served", "server"),
)  # fmt: skip
# Metrics that a kill may change.
_COUNTED = re.compile(r" (engine/(lost|returned|repeated)|scorers/lost|(idle|queue)/\w+)$")


def trials(rig: Rig, count: int | None, seed: int) -> list[Trial]:
    """Trials in which a process is killed after a random share of the run's time."""
    rng = random.Random(seed)
    found = []
    for number in range(count or PROMISED):
        config, role = KINDS[number % len(KINDS)]
        share = rng.random()
        name = f"{seed}.{number} {config}, {role} at {share:.4f}"
        found.append(Trial(name, config, partial(killed, rig, config, role, share)))
    return found


def killed(rig: Rig, config: str, role: str, share: float) -> str:
    """Kill a process of a run, and check how the run ends."""
    seconds = rig.seconds[config] * share
    for _ in range(20):
        with rig.folder() as folder:
            ended, hit = kill(rig, config, folder, role, seconds)
            if not hit:
                seconds *= 0.8  # this run was faster than the measured one
                continue
            if role == "trainer":
                ended = rig.train(config, folder)
            if ended.status:
                return f"status {ended.status}: {ended.output[-400:]}"
            return differences(rig, config, folder)
    return "was not hit"


def kill(rig: Rig, config: str, folder: Path, role: str, seconds: float) -> tuple[Ended, bool]:
    """Start a run and kill one of its processes `seconds` after the start, or as soon as there is
    one. Returns how the run ended, and whether a process was killed."""
    began, hit = time.monotonic(), False
    process = start(rig.action(config, folder), to_file(folder / "log"))
    status = wait(process, seconds)
    while status is None and not hit:
        found = [process] if role == "trainer" else processes_of(process, ROLES[role])
        for number in found[-1:]:
            os.kill(number, signal.SIGKILL)
            hit = True
        status = wait(process, 0.01) if not hit else None
    if status is None:
        status = wait(process, DEADLINE)
    ended = finish(process, status, time.monotonic() - began, folder / "log", meant=True)
    return ended, hit


def processes_of(process: int, words: str) -> list[int]:
    """The descendants of a process whose command lines contain `words`, without ranks, which have
    the command of their server among their options."""
    found = []
    try:
        for child in psutil.Process(process).children(recursive=True):
            line = child.cmdline()
            # Neither a server's shell nor a rank.
            if words in " ".join(line) and not (line[0].endswith("sh") or "train" in line):
                found.append(child.pid)
    except psutil.NoSuchProcess:
        pass
    return found


def differences(rig: Rig, config: str, folder: Path) -> str:
    """The differences of a run from the undisturbed one: of any bit at staleness 0, else of the
    groups and their prompts."""
    if config in ("beside", "remote", "2 servers"):
        return rig.differences(config, folder, ignoring=_COUNTED)
    whole, found = told(rig.whole(config)), told(folder / "run")
    if found != whole:
        return f"groups {found} are not {whole}"
    return ""


def told(run: Path) -> list[object]:
    """The groups that a run has trained, by step, and the prompts in its completions file."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    groups = [(line["step"], line["groups/first"], line["epoch"]) for line in metrics]
    return [groups, [(row["step"], row["prompt"]) for row in rows]]
