"""Checks before a run by Ray: a cluster responds at the address, and the nodes have the resources
of the run. Without these checks Ray repeats warnings for minutes. This module does not import
Ray."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rloo.addons.launch.roles import LaunchJob

# The longest wait for a connection, for the answer of a cluster, and for nodes that are about to
# join the cluster.
ADDRESS_SECONDS = 5.0
CLUSTER_SECONDS = 20.0
RESOURCE_SECONDS = 15.0
# Asks for the health of the cluster at the address that follows. Status 0: the cluster responds.
# Ray compares the versions itself.
_HEALTH = (
    sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check",
    "--address",
)  # fmt: skip
# The status of Ray's command line if it has no such command or option.
_NO_COMMAND = 2
_FAULT = re.compile(r"^ray\.exceptions\.\w+: (.+)", re.MULTILINE)
_HOST_PORT = re.compile(r"(?:ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})(?:[/?].*)?")


def check_address(address: str | None) -> None:
    """Raise ConnectionError if no process listens at `HOST:PORT`. Other forms of an address, as
    `auto`, are left to Ray."""
    found = _HOST_PORT.fullmatch(address or "")
    if found is None:
        return
    try:
        place = found["host"], int(found["port"])
        socket.create_connection(place, ADDRESS_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ConnectionError(
            f"no Ray cluster responds at {address}: {reason}; start one there with `ray start "
            "--head`, or give the address of another (ray_address, RAY_ADDRESS)"
        ) from None


def check_cluster(
    address: str | None,
    health: Sequence[str] = _HEALTH,
    seconds: float = CLUSTER_SECONDS,
) -> None:
    """Raise ConnectionError if the process at `HOST:PORT` does not respond as a Ray cluster within
    `seconds`. `health` is the command that asks it. Other forms of an address are left to Ray."""
    if address is None or "://" in address or _HOST_PORT.fullmatch(address) is None:
        return
    try:
        asked = subprocess.run(
            [*health, address], capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        fact = f"does not respond as a Ray cluster within {seconds:g} s"
    else:
        if asked.returncode in (0, _NO_COMMAND):
            return
        said = _FAULT.findall(asked.stderr)
        reason = said[-1] if said else f"`ray health-check` has the status {asked.returncode}"
        fact = f"does not respond as a Ray cluster: {reason}"
    raise ConnectionError(
        f"the process at {address} {fact}; give the address that `ray start --head` has printed "
        "(ray_address, RAY_ADDRESS)"
    )


def check_resources(
    job: LaunchJob,
    nodes: Callable[[], Sequence[Mapping[str, float]]],
    seconds: float = RESOURCE_SECONDS,
) -> None:
    """Wait until the nodes together have the resources of the run. `nodes` returns the resources of
    each active node. Raises ValueError after `seconds`. Resources that other programs use count
    too, since these programs may end."""
    end = time.monotonic() + seconds
    while lacking := shortage(job, nodes()):
        if time.monotonic() >= end:
            raise ValueError(lacking)
        time.sleep(min(1.0, seconds))


def shortage(job: LaunchJob, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """The sentence that compares the resources of the run with those of the nodes; None if the
    nodes may suffice."""
    roles, asked = [(role, job.needs(role)) for role in (job.trainer, *job.others)], _asked(job)
    here = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    rooms = [(role, _room(needs, nodes)) for role, needs in roles]
    if all(asked[name] <= here[name] for name in asked) and all(r.count <= n for r, n in rooms):
        return None
    parts = [f"{role.count} {role.name}s of {_shown(needs)}" for role, needs in roles]
    room = "".join(
        f", with room for {number} of the {role.count} {role.name}s"
        for role, number in rooms
        if number < role.count
    )
    return (
        f"the run asks Ray for {_shown(asked)} ({', '.join(parts)}), and the cluster has "
        f"{_shown(here)} on {len(nodes)} node{'s' * (len(nodes) != 1)}{room} (trainer_gpus, "
        "engine_gpus, threads; ray_autoscaling waits for nodes that the cluster adds)"
    )


def waiting(job: LaunchJob, free: Mapping[str, float]) -> str | None:
    """The sentence about a run that waits for resources that other programs use. `free` are those
    that no program uses. None if they may suffice."""
    asked = _asked(job)
    here = {name: free.get(name, 0.0) for name in asked}
    if all(asked[name] <= here[name] for name in asked):
        return None
    return (
        f"the run asks Ray for {_shown(asked)}, and {_shown(here)} of the cluster are free; it "
        "waits until other programs end"
    )


def _asked(job: LaunchJob) -> dict[str, int]:
    """The resources of all processes of a run."""
    asked = Counter[str]()
    for role in (job.trainer, *job.others):
        for name, number in job.needs(role).items():
            asked[name] += role.count * number
    return dict(sorted(asked.items()))


def _room(needs: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> int:
    """The number of processes with these needs that fit if no other process runs."""
    return sum(
        int(min(node.get(name, 0) // least for name, least in needs.items())) for node in nodes
    )


def _shown(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{number:g} {name}" for name, number in resources.items())
