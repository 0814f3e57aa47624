"""Runs a job on this machine: ranks as in `rloo train --num_processes`, and supervised processes
that sample, serve and score. A supervised process is restarted if it dies."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rloo.addons.launch.local_ranks import SAVING, launch
from rloo.addons.launch.roles import KEY_LINE, LaunchJob, Role
from rloo.addons.launch.supervisor import Supervisor
from rloo.engines.vllm.server_process import KEY, server_key


def run_here(job: LaunchJob, *, saving: float = SAVING) -> int:
    """Run a job on this machine; returns the status of `rloo.addons.launch.local_ranks.launch`."""
    environment = {"MASTER_ADDR": "127.0.0.1", **job.environment}
    if job.servers:  # the key stops other users of this machine
        environment[KEY] = server_key()
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        with _beside(job) as keepers:
            config = job.config.with_values(num_processes=job.trainer.count)
            arguments = [*job.arguments, *job.extra, *urls(job)]
            program = job.started("train") if job.cluster.setup else None
            return launch(
                arguments,
                config,
                program=program,
                saving=saving,
                refusal=lambda: next((k.refusal for k in keepers if k.refusal), None),
            )
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def script(job: LaunchJob) -> str:
    """The job as a bash script without supervision, as `--dry_run` prints it."""
    count = ["--num_processes", str(job.trainer.count)]
    return by_hand(job, [], [f"{job.trainer.line} {shlex.join([*count, *job.extra, *urls(job)])}"])


def by_hand(job: LaunchJob, remarks: Sequence[str], ranks: Sequence[str]) -> str:
    """A bash script with the comments `remarks`. It starts the processes of the other roles, then
    runs the lines `ranks`."""
    lines = [
        "#!/usr/bin/env bash",
        f"# {job.trainer.count} to train" + "".join(f", {r.count} {r.name}s" for r in job.others),
        *(f"# {remark}" for remark in remarks),
        "set -u",
        "trap 'kill $(jobs -p) 2>/dev/null' EXIT",
        *(f"export {name}={value}" for name, value in job.environment.items()),
        *([KEY_LINE] if job.servers else []),
        *job.cluster.checked_setup,
        "",
    ]
    for role in job.others:
        for number in range(role.count):
            settings = "".join(f"{n}={v} " for n, v in environment_of(job, role, number).items())
            lines.append(f"{settings}{role.line} &")
    return "\n".join([*lines, *ranks, ""])


def urls(job: LaunchJob) -> list[str]:
    """The URLs of the vLLM servers on this machine."""
    ports = range(job.servers.count if job.servers else 0)
    return [f"http://127.0.0.1:{job.cluster.port + 1 + number}" for number in ports]


def environment_of(job: LaunchJob, role: Role, number: int) -> dict[str, str]:
    """The environment variables of process `number` of a role on this machine."""
    found = {}
    if role.gpus:
        first = job.trainer.count + number * role.gpus
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(first, first + role.gpus)))
    if role.name == "server":
        found |= {"ADDRESS": "127.0.0.1", "PORT": str(job.cluster.port + 1 + number)}
    return found


@contextmanager
def _beside(job: LaunchJob) -> Iterator[list[Supervisor]]:
    """Supervise the processes of the other roles during this block."""
    keepers = []
    for role in job.others:
        for number in range(role.count):
            environment = environment_of(job, role, number)
            command = job.command(role, *(environment.get(n, "") for n in ("ADDRESS", "PORT")))
            keepers.append(Supervisor(role.name, number, command, environment, job.logs))
    threads = [keeper.start() for keeper in keepers]
    try:
        yield keepers
    finally:
        for keeper in keepers:
            keeper.over.set()
        for keeper in keepers:
            keeper.end()
        for thread in threads:
            thread.join(15.0)
        sys.stderr.flush()
