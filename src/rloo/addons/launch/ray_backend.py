"""Runs a job with Ray: Ray Train's TorchTrainer runs the ranks, and actors run the other roles. Ray
places and restarts ranks and actors. Ranks and servers are the same child processes as with other
launchers. Rank 0 calls the actors that sample and score (`rloo.addons.launch.ray_workers`)."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec

from rloo.addons.launch.local_backend import by_hand, urls
from rloo.addons.launch.ray_checks import check_address, check_cluster
from rloo.addons.launch.roles import AGAIN, LaunchJob
from rloo.algorithm.stop_signals import StopSignals
from rloo.config.optional_packages import install


def script(job: LaunchJob) -> str:
    """The job as a bash script that starts the same processes without Ray, as `--dry_run` prints
    it."""
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
    """Run a job with Ray from this process and return its status. After a signal the run saves and
    ends. Raises ValueError if Ray is not installed or cannot place the job. Raises OSError if no
    cluster responds at `ray_address`, or if the ranks have died too often."""
    if find_spec("ray") is None:
        raise ValueError(f"backend is ray, which is not installed: {install('ray')} (backend)")
    given = job.cluster.ray_address
    address = os.environ.get("RAY_ADDRESS") if given in (None, "auto") else given
    check_address(address)
    check_cluster(address)
    # Ray's usage reports are off unless the user turns them on.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from rloo.addons.launch.ray_actors import run_by_ray

    return run_by_ray(job, signals)
