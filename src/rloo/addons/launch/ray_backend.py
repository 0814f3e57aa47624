"""A job by Ray: ranks by Ray Train's TorchTrainer, and what is beside them as actors. Ray places
them, watches them and starts them again; each keeps a child, the one that other launchers start."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec

from rloo.addons.launch.local_backend import by_hand, urls
from rloo.addons.launch.roles import AGAIN, LaunchJob
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.optional_packages import install


def script(job: LaunchJob) -> str:
    """The job as a script of bash, which starts the same processes by hand: what `--dry_run`
    shows."""
    placed = ", ".join(f"{role.count} {role.name}s of {job.needs(role)}" for role in job.others)
    size = job.trainer.count
    remarks = [
        f"By Ray: {size} ranks of {job.needs(job.trainer)}, which start again up to "
        f"{job.cluster.ray_restarts} times; {placed or 'nothing'} ({job.cluster.ray_placement}).",
        "By hand they start here; elsewhere with MASTER_ADDR, the machine of rank 0.",
    ]
    port = job.cluster.port
    ranks = [f"export MASTER_ADDR=${{MASTER_ADDR:-127.0.0.1}} MASTER_PORT={port}"]
    line = f"{job.trainer.line} {shlex.join([*AGAIN, *job.extra, *urls(job)])}"
    for rank in [*range(1, size), 0]:
        local = f"LOCAL_RANK={rank} LOCAL_WORLD_SIZE={size}"
        ranks.append(f"RANK={rank} WORLD_SIZE={size} {local} {line}{' &' if rank else ''}")
    return by_hand(job, remarks, ranks)


def run(job: LaunchJob, signals: StopSignals) -> int:
    """Run a job by Ray, from where this process is; its status. A signal has the run save and end.
    Raises ValueError where Ray is not installed or has no place for the job, OSError where there is
    no cluster at `ray_address` or the ranks have died too often."""
    if find_spec("ray") is None:
        raise ValueError(f"backend is ray, which is not installed: {install('ray')} (backend)")
    # A cluster that is started here reports to nobody, unless its user wants that.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from rloo.addons.launch.ray_actors import run_by_ray

    return run_by_ray(job, signals)
