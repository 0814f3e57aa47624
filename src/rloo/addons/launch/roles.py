"""The roles of a run's processes: their command lines, their number, and their nodes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rloo.addons.launch.cluster import Cluster
from rloo.addons.launch.local_ranks import this_program
from rloo.config.config import RLOOConfig
from rloo.config.engine_spec import engine_spec
from rloo.config.parsing import given_names, parse_command_line
from rloo.config.vllm_options import shares_ranks_gpus
from rloo.config.vllm_validation import undivided
from rloo.engines.vllm.server_process import KEY
from rloo.tracking.jsonl import LOGS

RLOO = "python -m rloo"
# The line of a script that creates the key of vLLM servers, if the user has set none. The key stops
# others from loading weights into a server.
KEY_LINE = f'export {KEY}="${{{KEY}:-$(od -An -N16 -tx1 /dev/urandom | tr -d " \\n")}}"'
# Options of ranks that a scheduler restarts: resume from the newest checkpoint.
AGAIN = ("--resume_from_checkpoint", "auto")


@dataclass(frozen=True)
class Role:
    """`count` processes of one kind with `gpus` GPUs each. They run on consecutive nodes, starting
    at node number `first`, with `per_node` processes on each node. `line` is the shell command of a
    process."""

    name: str
    count: int
    line: str
    per_node: int
    first: int = 0
    gpus: int = 0

    @property
    def nodes(self) -> int:
        """The number of nodes for these processes."""
        return -(-self.count // self.per_node)


@dataclass(frozen=True)
class LaunchJob:
    """A launched run: the cluster, the run's arguments and configuration, and the options `extra`
    that follow from the cluster."""

    cluster: Cluster
    arguments: tuple[str, ...]
    config: RLOOConfig
    # If there are vLLM servers, their URLs are appended to these options.
    extra: tuple[str, ...]
    trainer: Role
    others: tuple[Role, ...]

    @property
    def servers(self) -> Role | None:
        """The role of vLLM's servers, or None; the trainer must know their URLs."""
        return next((role for role in self.others if role.name == "server"), None)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.output_dir).absolute()

    @property
    def logs(self) -> Path:
        """The folder of the logs, in the run's folder."""
        return self.folder / LOGS

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of every process."""
        threads = self.cluster.threads
        return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}

    def command(self, role: Role, address: str = "", port: str = "") -> list[str]:
        """The command of a role's processes as a list of words. It uses the Python interpreter of
        this process, or `python` if the cluster has `setup` lines, which run first. A server
        listens at `address` and `port`."""
        line = role.line.removeprefix(RLOO).replace("$ADDRESS", address).replace("$PORT", port)
        return self.started(*shlex.split(line))

    def needs(self, role: Role) -> dict[str, int]:
        """The resources of one process of a role, by Ray's names."""
        found = {"CPU": self.cluster.threads or 1}
        return found | ({"GPU": role.gpus} if role.gpus else {})

    def started(self, *words: str, module: str = "rloo") -> list[str]:
        """The command that starts `rloo`, or a module, with the arguments `words`."""
        if not self.cluster.setup:
            return [*this_program(module), *words]
        lines = "\n".join([*self.cluster.checked_setup, 'exec "$@"'])
        return ["bash", "-c", lines, "bash", "python", "-m", module, *words]


def make_job(
    cluster: Cluster, arguments: Sequence[str], folder: str | None = None, under: str | None = None
) -> LaunchJob:
    """The job that runs `rloo train` with these `arguments` on a cluster. `folder` is a shell
    expression for an output_dir that is known only later. `under` is the task file that is used if
    the arguments name no model and no data. Raises ValueError if the options of run and cluster
    conflict."""
    config = parse_command_line(list(arguments), under)
    _check(cluster, config)
    size = config.vllm_tensor_parallel_size if _is_vllm(config) else 1
    engines, gpus = cluster.engine_gpus // size, size if cluster.gpus_per_node else 0
    first = _trainers_nodes(cluster) % cluster.nodes
    training, sampling = range(first or cluster.nodes), range(first, cluster.nodes)
    folder = folder or shlex.quote(config.output_dir)
    line = shlex.join(arguments)
    others: list[Role] = []
    extra: list[str] = []
    if engines and _is_vllm(config):
        serve = f"{RLOO} vllm-serve {line} --vllm_server_host $ADDRESS --vllm_server_port $PORT"
        others.append(_role("server", engines, serve, sampling, gpus))
        extra += ["--rollout_engine", "vllm_server", "--vllm_server_base_url"]
    elif engines:
        sample = f"{RLOO} worker sample {folder}"
        others.append(_role("sampler", engines, sample, sampling, gpus))
        extra += ["--sampler_processes", str(engines)]
    if cluster.scorers:
        score = f"{RLOO} worker score {folder}"
        others.append(_role("scorer", cluster.scorers, score, training))
        extra = ["--async_kwargs.reward_workers", str(cluster.scorers), *extra]
    placed = {role.name for role in others} & {"sampler", "scorer"}
    if placed:
        word = "both" if len(placed) == 2 else "sample" if "sampler" in placed else "score"
        extra = ["--async_kwargs.remote_workers", word, *extra]
    train = f"{RLOO} train {line}"
    trainer = _role("trainer", cluster.trainers, train, training, min(1, cluster.gpus_per_node))
    known = ["http://server:8000"] if extra and extra[-1].endswith("_url") else []
    # This only checks that the options are valid together.
    parse_command_line([*arguments, *extra, *known], under)
    return LaunchJob(cluster, tuple(arguments), config, tuple(extra), trainer, tuple(others))


def check_again(job: LaunchJob) -> None:
    """Raise ValueError for options of the run that a restarted job would apply a second time."""
    for name in {"resume_from_checkpoint", "overwrite_output_dir"} & given_names([*job.arguments]):
        if (value := getattr(job.config, name)) not in ("auto", None, False):
            raise ValueError(
                f"{name} is {value}; a job that is started again goes on at the newest checkpoint "
                f"of its own output_dir, and would do this once more: leave it out ({name})"
            )


def _trainers_nodes(cluster: Cluster) -> int:
    """The number of nodes that only train; the number of all nodes if they also sample."""
    if cluster.gpus_per_node:
        return -(-cluster.trainers // cluster.gpus_per_node)
    if cluster.slurm_engine_options is None:
        return cluster.nodes
    both = cluster.trainers + cluster.engine_gpus
    return min(cluster.nodes - 1, -(-cluster.nodes * cluster.trainers // both))


def _is_vllm(config: RLOOConfig) -> bool:
    return engine_spec(config.rollout_engine).options == "vllm"


def _role(
    name: str,
    count: int,
    line: str,
    nodes: range,
    gpus: int = 0,
) -> Role:
    """A role whose processes are spread evenly over these nodes."""
    return Role(name, count, line, -(-count // len(nodes)), nodes.start, gpus)


def _check(cluster: Cluster, config: RLOOConfig) -> None:
    size = config.vllm_tensor_parallel_size
    # Without GPUs of their own, servers are on the GPUs that train (engines/vllm/colocation.py).
    colocated = config.rollout_engine == "vllm" and not config.max_staleness
    if _is_vllm(config) and (cluster.engine_gpus % size or not (cluster.engine_gpus or colocated)):
        least = "" if colocated else ", above 0"
        raise ValueError(
            f"rollout_engine is {config.rollout_engine} and engine_gpus {cluster.engine_gpus}; it "
            f"must be a multiple of vllm_tensor_parallel_size {size}{least} (engine_gpus)"
        )
    if not cluster.engine_gpus and shares_ranks_gpus(config) and cluster.trainers > 1:
        _check_ranks(cluster, size)
    if config.num_processes not in (None, cluster.trainers):
        raise ValueError(
            f"num_processes is {config.num_processes} and trainer_gpus is {cluster.trainers}; "
            "leave num_processes out of what is launched (num_processes)"
        )
    for name, value in (
        ("sampler_processes", config.sampler_processes),
        ("async_kwargs.remote_workers", config.async_options.remote_workers),
        ("vllm_server_base_url", config.vllm_server_base_url),
    ):
        if value is not None:
            raise ValueError(
                f"{name} is {value}; it follows from what is placed where: leave "
                f"it out of what is launched ({name}; engine_gpus, scorers)"
            )


def _check_ranks(cluster: Cluster, size: int) -> None:
    """Raise ValueError if the ranks cannot share servers of `size` GPUs, of which each is on one
    machine. Ray decides itself how many ranks a machine has."""
    if cluster.trainers % size:
        raise ValueError(undivided(cluster.trainers, size, "trainer_gpus"))
    nodes = _trainers_nodes(cluster)
    here = -(-cluster.trainers // nodes)
    if cluster.backend == "slurm" and here % size:
        raise ValueError(
            f"vllm_tensor_parallel_size is {size} and {here} processes train on each of "
            f"{nodes} nodes; a server has the GPUs of {size} processes of one node, so "
            "their number must be a multiple (vllm_tensor_parallel_size, trainer_gpus, nodes)"
        )
