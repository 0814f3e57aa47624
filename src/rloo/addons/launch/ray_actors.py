"""Runs a job with Ray: the actors, the ranks and the driver. This module needs Ray. torch is
imported only for ranks, since an actor without torch needs 300 MB less memory."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rloo.addons.launch.local_ranks import BAD_INPUT, LOOK_SECONDS, free_port
from rloo.addons.launch.ray_checks import check_resources, waiting
from rloo.addons.launch.ray_workers import KIND_OF, Done, RayRegistry, WorkerActor
from rloo.addons.launch.roles import AGAIN, LaunchJob, Role
from rloo.addons.launch.supervisor import REFUSED, RESTARTS, SIGNALS, Supervisor, note
from rloo.algorithm.stop_signals import Stopped, StopSignals
from rloo.distributed.child_process import ChildProcess, shell_status
from rloo.distributed.standard_streams import say
from rloo.distributed.world import REGISTRY
from rloo.engines.vllm.server_process import KEY, server_key
from rloo.tracking.jsonl import EVENTS
from rloo.tracking.run_reader import read_rows
from rloo.trainer.heartbeat import STOP
from rloo.trainer.run_lock import lives

# Variables that are valid only for this process or machine; others are passed on, as by sbatch.
_OURS = ("RAY_", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_")
_KILLED = 137
_ANSWER_SECONDS = 60.0
_NODE = "ray.io/node-id"  # a label that Ray sets on each node
# Seconds in which Ray Train must find a place for the ranks (60). After that it prints a traceback
# and begins again, without a limit.
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


# The environment variable in which rank 0 finds the names of the actors that sample and score.
_NAMES = "RLOO_RAY_WORKERS"


class SupervisorActor:
    """An actor that supervises a vLLM server. Ray restarts the actor,
    on another node if its node is lost."""

    def __init__(self, job: LaunchJob, role: Role, number: int, cwd: str) -> None:
        with free_port("") as port:
            self._port = port
        command = job.command(role, ray.util.get_node_ip_address(), str(self._port))
        folder = job.logs
        self._keeper = Supervisor(role.name, number, command, job.environment, folder, cwd)
        self._keeper.start()

    def url(self) -> str:
        """The URL of the server."""
        return f"http://{ray.util.get_node_ip_address()}:{self._port}"

    def end(self) -> None:
        """End the process."""
        self._keeper.end()


@dataclass(frozen=True)
class RayActors:
    """See `rloo.addons.launch.ray_workers.Actors`. `names` has the names of the actors of each
    kind."""

    address: str
    namespace: str
    names: dict[str, list[str]]

    def connect(self) -> dict[str, list[Any]]:
        """See `Actors`."""
        ray.init(
            address=self.address, namespace=self.namespace, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
        return {kind: [*map(ray.get_actor, some)] for kind, some in self.names.items()}

    def join(self, actor: Any, done: Done) -> None:
        """See `Actors`."""
        _when_done(actor.join.options(max_task_retries=-1).remote(), done)

    def call(self, actor: Any, parts: Sequence[bytes], done: Done) -> None:
        """See `Actors`."""
        _when_done(actor.call.remote(*parts), done)

    def kill(self, actor: Any) -> None:
        """See `Actors`."""
        ray.kill(actor, no_restart=False)

    def is_final(self, error: BaseException) -> bool:
        """See `Actors`."""
        return isinstance(error, ActorDiedError)

    def close(self) -> None:
        """See `Actors`."""
        ray.shutdown()


def _when_done(reference: Any, done: Done) -> None:
    def tell(future: Future[Any]) -> None:
        error = future.exception()
        done(None if error else future.result(), error)

    reference.future().add_done_callback(tell)


def registry_here() -> RayRegistry:
    """The registry of the actors that the launcher has started, in rank 0."""
    return RayRegistry(RayActors(**json.loads(os.environ[_NAMES])))


def run_by_ray(job: LaunchJob, signals: StopSignals) -> int:
    """Run a job by Ray: see `rloo.addons.launch.ray_backend.run`."""
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    if job.servers:  # the key stops others on the network from loading weights into a server
        os.environ[KEY] = server_key()
    ray.init(address=job.cluster.ray_address)
    try:
        if not job.cluster.ray_autoscaling:
            check_resources(job, _resources)
        announce_waiting(job, ray.available_resources())
        if os.environ.get("RAY_AUTH_MODE") != "token":
            say(
                "rloo: this Ray cluster asks for no token: whoever reaches it may run what they "
                "like (RAY_AUTH_MODE=token)",
                sys.stderr,
            )
        refused = len(refusals(job))
        # Ray has replaced our signal handlers.
        with signals.handling(), _beside(job) as (servers, label_selector):
            # Not passed as train_loop_config, which Ray's own processes would read; they may lack
            # rloo.
            trainer = TorchTrainer(
                partial(rank_by_ray, job, servers, os.getcwd(), _names(job)),
                torch_config=TorchConfig(backend="gloo"),  # Ray's group; the run creates another
                scaling_config=ray.train.ScalingConfig(
                    num_workers=job.trainer.count,
                    use_gpu=job.trainer.gpus > 0,
                    resources_per_worker=job.needs(job.trainer),
                    placement_strategy="PACK",
                    label_selector=label_selector,
                ),
                run_config=ray.train.RunConfig(
                    name="ray",
                    storage_path=str(job.logs),
                    failure_config=ray.train.FailureConfig(max_failures=job.cluster.ray_restarts),
                    worker_runtime_env={"env_vars": _environment()},
                ),
            )
            before = len(_statuses(job))
            fit(trainer, job, refused)
            last = _statuses(job)[before:][-job.trainer.count :]
            if len(last) < job.trainer.count:
                raise OSError(f"{job.logs / EVENTS} does not say how the ranks have ended")
            return next(filter(None, last), 0)
    finally:
        ray.shutdown()


def rank_by_ray(job: LaunchJob, servers: list[Any], cwd: str, names: str) -> None:
    """Run `rloo train` as a rank in a child process of a Ray Train worker. Raises RuntimeError if
    the rank died; Ray then restarts all ranks."""
    import ray.train
    import torch.distributed as dist

    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    urls = list(_urls(servers)) if rank == 0 else []
    with free_port("") as port:
        place: list[Any] = [ray.util.get_node_ip_address(), port, urls]
        dist.broadcast_object_list(place, src=0)
        environment = {
            "MASTER_ADDR": place[0], "MASTER_PORT": str(place[1]),
            "RANK": str(rank), "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            **job.environment,
            REGISTRY: "rloo.addons.launch.ray_actors:registry_here", _NAMES: names,
        }  # fmt: skip
        arguments = [*job.arguments, *AGAIN, *job.extra, *place[2]]
        status = _child(job, rank, job.started("train", *arguments), environment, cwd)
    note(job.logs, job.trainer.name, rank, "ended", status=status)
    # Other statuses are success, bad input, or a requested stop after saving.
    if status == _KILLED or (0 < status < 128 and status != BAD_INPUT):
        raise RuntimeError(f"rank {rank} ended with status {status}")


def _names(job: LaunchJob) -> str:
    """The names by which rank 0 finds the actors that sample and score, as JSON."""
    names = {
        KIND_OF[role.name]: [f"{role.name}-{n}" for n in range(role.count)]
        for role in job.others
        if role.name in KIND_OF
    }
    here = ray.get_runtime_context()
    return json.dumps({"address": here.gcs_address, "namespace": here.namespace, "names": names})


def _child(
    job: LaunchJob, rank: int, command: list[str], environment: dict[str, str], cwd: str
) -> int:
    """Run a rank and return its status. Rank 0 prints to Ray's log; other ranks write log files."""
    process = ChildProcess(
        command,
        environment={**os.environ, **environment},
        folder=cwd,
        log=job.logs / f"trainer-{rank}.log" if rank else None,
        unblocked=SIGNALS,
    )
    return shell_status(process.join())


def _urls(servers: list[Any]) -> Iterator[str]:
    """The URLs of the servers that respond; a restarted server may have another URL."""
    for server in servers:
        with suppress(RayError):
            yield ray.get(server.url.remote(), timeout=_ANSWER_SECONDS)


@contextmanager
def _beside(job: LaunchJob) -> Iterator[tuple[list[Any], dict[str, str] | None]]:
    """Start the actors of the other roles, and end them after this block. Yields the servers, and
    Ray's label selector for the nodes of the ranks (None: any node)."""
    actors: list[Any] = []
    servers: list[Any] = []
    job.logs.mkdir(parents=True, exist_ok=True)
    engines = [(role, n) for role in job.others if role.name != "scorer" for n in range(role.count)]
    group = _group(job, [job.needs(role) for role, _ in engines]) if engines else None
    try:
        for index, (role, number) in enumerate(engines):
            place = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}
            actors.append(_actor(job, role, number, place))
            servers += actors[-1:] if role.name == "server" else []
        for role in job.others:
            if role.name == "scorer":
                actors += [_actor(job, role, n, _without_gpus()) for n in range(role.count)]
        yield servers, _apart(job, group) if group is not None else None
    finally:
        ends = [server.end.remote() for server in servers]
        with suppress(RayError):
            ray.wait(ends, num_returns=len(ends), timeout=15.0) if ends else None
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)


def announce_waiting(job: LaunchJob, free: Mapping[str, float]) -> None:
    """Print a sentence if other programs use resources of the run; `free` are those that no program
    uses. Ray Train then waits for `ddp_timeout`, unless the user has set its own timeout."""
    os.environ.setdefault(START_TIMEOUT, str(job.config.ddp_timeout))
    if said := waiting(job, free):
        say(f"rloo: {said}", sys.stderr)


def _group(job: LaunchJob, bundles: list[dict[str, int]]) -> PlacementGroup:
    """A placement group for the sampling processes. Raises ValueError if Ray cannot place them."""
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(5):
        here = {name: n for name, n in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        if waiting(job, ray.available_resources()) is None:  # else this has been said
            say(f"rloo: waiting for Ray to place {bundles}; the cluster has {here}")
        if not group.wait(job.config.ddp_timeout):
            remove_placement_group(group)
            raise ValueError(
                f"Ray has found no place for {bundles} within {job.config.ddp_timeout} s; it has "
                f"{here} (engine_gpus, threads)"
            )
    return group


def _apart(job: LaunchJob, group: PlacementGroup) -> dict[str, str] | None:
    """Ray's label selector for the nodes of the ranks; None means any node. Raises ValueError if no
    node is left for the ranks."""
    if job.cluster.ray_placement == "pack":
        return None
    taken = {*ray.util.placement_group_table(group)["bundles_to_node_id"].values()}
    if not {node["NodeID"] for node in ray.nodes() if node["Alive"]} - taken:
        raise ValueError(
            f"ray_placement is spread, and what samples is on all of Ray's {len(taken)} nodes; "
            "have more of them, or pack (ray_placement)"
        )
    return {_NODE: f"!in({','.join(sorted(taken))})"}


def _without_gpus() -> dict[str, Any]:
    """Ray options that prefer a node without GPUs, and otherwise allow any node."""
    found: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
    up = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if some := sorted(name for name, has in up.items() if not has.get("GPU")):
        found["label_selector"] = {_NODE: f"in({','.join(some)})"}
        found["fallback_strategy"] = [{"label_selector": {_NODE: "!in(none)"}}]
    return found


def _actor(job: LaunchJob, role: Role, number: int, place: dict[str, Any]) -> Any:
    resources = job.needs(role)
    options = {
        "num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), **place,
        "max_restarts": RESTARTS, "runtime_env": {"env_vars": _environment()},
    }  # fmt: skip
    if role.name in KIND_OF:
        options |= {"name": f"{role.name}-{number}", "max_concurrency": 2}  # for `join`
    else:
        options["max_task_retries"] = 2
    kind = ray.remote(WorkerActor if role.name in KIND_OF else SupervisorActor)
    return kind.options(**options).remote(job, role, number, os.getcwd())


def _resources() -> list[dict[str, float]]:
    """The resources of each active node of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _statuses(job: LaunchJob) -> list[int]:
    """The exit statuses of the ranks that have ended, in the order of time."""
    events = read_rows(job.logs / EVENTS)
    return [row["status"] for row in events if row["role"] == job.trainer.name and "status" in row]


def refusals(job: LaunchJob) -> list[str]:
    """The sentences of the processes that have refused their options, in the order of time."""
    events = read_rows(job.logs / EVENTS)
    return [str(row.get("said")) for row in events if row["event"] == REFUSED]


def fit(trainer: Any, job: LaunchJob, refused: int) -> None:
    """Wait for the ranks. After the first signal the ranks save and end, after the second at once.
    Raises ValueError, also after the ranks have saved, if more than `refused` processes have
    refused their options."""
    errors: list[BaseException] = []
    over = threading.Event()  # Thread.join interrupted by a signal marks a live thread as ended

    def train() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    # Ray installs no signal handlers outside the main thread.
    threading.Thread(target=train, daemon=True).start()
    try:
        while not over.wait(LOOK_SECONDS):
            if said := refusals(job)[refused:]:
                raise ValueError(said[0])
    except (KeyboardInterrupt, Stopped, ValueError):
        if lives(job.folder):
            (job.folder / STOP).touch()
            over.wait()
        raise
    if errors:
        said = str(errors[0]).strip().splitlines()[-1:]
        raise ChildProcessError(
            f"Ray has given the run up: {' '.join(said)} ({job.logs}; ray_restarts)"
        ) from errors[0]


def _environment() -> dict[str, str]:
    return {n: value for n, value in os.environ.items() if not n.startswith(_OURS)}
