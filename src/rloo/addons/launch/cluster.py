"""The options of `rloo launch`: nodes, GPUs, roles and scheduler settings, from the command line or
a file. The options of the training are separate."""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rloo.addons.launch.slurm_options import split_option, unsafe
from rloo.config.fields import ConfigErrors, OptionGroup, coerce, config_errors, suggest
from rloo.config.yaml_io import read_yaml

# ruff: noqa: RUF009 - a group's methods return dataclasses.field(...)

PLACES = OptionGroup("What is placed where")
SLURM, RAY = OptionGroup("Slurm"), OptionGroup("Ray")
# AReaL's allocation: data, tensor and pipeline parallelism (d, t, p) of the engine and the trainer.
_ALLOCATION = re.compile(r"(?:(?P<engine>vllm|sglang)\.?(?:\[\w+\])?:?(?P<theirs>[dtp0-9]+)\+)?"
                         r"(?:(?:fsdp|megatron)\.?:?)?(?P<ours>[dtpc0-9]+)")  # fmt: skip
_WITHOUT_VALUE = ("dry_run",)
_MEMORY = re.compile(r"\d+[KMGT]?")
_GRES = re.compile(r"[\w.-]+(:(?!\d+$)[\w.-]+)?")
_ONE_LINE = (
    "slurm_partition", "slurm_account", "slurm_time", "slurm_array", "slurm_container",
    "slurm_container_image",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The options of `rloo launch`."""

    # fmt: off
    backend: Literal["local", "ray", "slurm"] = PLACES.rloo("local",
        "What places the processes: this machine, Ray or Slurm.")
    nodes: int = PLACES.rloo(1, "Machines.")
    gpus_per_node: int = PLACES.rloo(0, "GPUs of each; 0 computes on their CPUs.")
    trainer_gpus: int | None = PLACES.rloo(None,
        "Processes that train, with a GPU each; null takes what engine_gpus leaves, or 1 on a CPU.")
    engine_gpus: int = PLACES.rloo(0,
        "GPUs that sample: native engines with one each, vLLM's servers with as many as "
        "vllm_tensor_parallel_size; on CPUs so many processes. 0 samples where it is trained.")
    scorers: int = PLACES.rloo(0,
        "Processes that call reward functions; 0 leaves that to the trainer's machine.")
    threads: int | None = PLACES.rloo(None,
        "Threads of each process (OMP_NUM_THREADS); null leaves the environment as it is.")
    port: int = PLACES.rloo(10000,
        "First of the ports of vLLM's servers, and by Slurm of the trainer's first process.")
    setup: list[str] = PLACES.rloo([],
        "Lines of shell before anything starts: modules, an environment, variables.")
    ray_address: str | None = RAY.rloo(None,
        "The cluster; null takes RAY_ADDRESS, or the one of this machine, or starts one here.")
    ray_placement: Literal["pack", "spread"] = RAY.rloo("pack",
        "What samples and what trains: on as few nodes as possible, or on none together.")
    ray_autoscaling: bool = RAY.rloo(False,
        "The cluster adds nodes when a run asks for them; false refuses a run that asks for more "
        "than the cluster has.")
    ray_restarts: int = RAY.rloo(3,
        "How often the ranks start again, at the last checkpoint, when one or its node has died.")
    slurm_partition: str | None = SLURM.rloo(None, "Partition.")
    slurm_account: str | None = SLURM.rloo(None, "Account.")
    slurm_time: str | None = SLURM.rloo(None, "Time limit, as 04:00:00.")
    slurm_signal: int = SLURM.rloo(300,
        "Seconds before the time limit at which the run saves and its job is queued again.")
    slurm_requeue: bool = SLURM.rloo(True,
        "Queue the job again at its time limit, when it is preempted and when a node fails.")
    slurm_restarts: int = SLURM.rloo(3,
        "How often a job starts the run again, from its last checkpoint, after a process has died.")
    slurm_mem: str | None = SLURM.rloo(None,
        "Memory of each node, as 64G; null counts it for a job with GPUs, and otherwise leaves the "
        "default of the partition.")
    slurm_gres: str | None = SLURM.rloo(None,
        "Name of the GPUs, as gpu or gpu:h100, for --gres in place of --gpus-per-node.")
    slurm_max_requeues: int = SLURM.rloo(100,
        "How often a job may be queued again; after that it ends.")
    slurm_template: str | None = SLURM.rloo(None,
        "A file in place of the package's job.sbatch, with the same $names.")
    slurm_container: str | None = SLURM.rloo(None,
        "What stands before every command: `apptainer exec --nv image.sif`.")
    slurm_container_image: str | None = SLURM.rloo(None,
        "Image that pyxis runs every process in (srun --container-image).")
    slurm_array: str | None = SLURM.rloo(None,
        "Numbers of an array of jobs, as 0-4: each trains with its number as the seed, in a folder "
        "of its own.")
    slurm_chain: int = SLURM.rloo(1, "Jobs, of which each goes on where the one before it ended.")
    slurm_engine_options: list[str] | None = SLURM.rloo(None,
        "Options of sbatch for the nodes that sample, as [--partition=l40s]: a heterogeneous job.")
    slurm_options: list[str] = SLURM.rloo([], "Further options of sbatch, as [--exclusive].")
    slurm_srun_options: list[str] = SLURM.rloo([],
        "Further options of every srun, as [--cpu-bind=none].")
    # fmt: on

    @property
    def trainers(self) -> int:
        """The number of training processes."""
        if self.trainer_gpus is not None:
            return self.trainer_gpus
        return max(1, self.nodes * self.gpus_per_node - self.engine_gpus)

    @property
    def checked_setup(self) -> list[str]:
        """The lines of `setup`. After a line that fails, the shell ends with a message."""
        failed = "rloo: a line of setup failed with status $status: "
        return [
            f"{line}\nstatus=$?; ((status == 0)) || "
            f'{{ echo "{failed}"{shlex.quote(line)} >&2; exit 1; }}'
            for line in self.setup
        ]


def read_cluster(arguments: Sequence[str]) -> tuple[Cluster, list[str], bool]:
    """Parse a command line of `rloo launch`. Returns (cluster, arguments of the run, whether
    `--dry_run` is given). Options override `--cluster FILE` and AReaL's `--allocation_mode`. Raises
    a ValueError that lists all faults."""
    known, hints = {f.name: f for f in fields(Cluster)}, typing.get_type_hints(Cluster)
    given: dict[str, Any] = {}
    left: list[str] = []
    words, faults = list(arguments), []
    while words:
        word = words.pop(0)
        key, equals, text = word.partition("=")
        name = key.removeprefix("--").replace("-", "_").replace(".", "_")
        is_ours = name in known or name in ("cluster", "allocation_mode", *_WITHOUT_VALUE)
        if not (is_ours and (word.startswith("--") or equals)):
            left.append(word)
        elif name in _WITHOUT_VALUE and not equals:
            given[name] = True
        elif equals or words:
            given[name] = text if equals else words.pop(0)
        else:
            faults.append(f"--{name} needs a value")
    written = _file(given.pop("cluster", None), known, faults)
    if mode := given.pop("allocation_mode", None):
        written |= _allocated(mode, faults)
    shown = bool(given.pop("dry_run", False))
    values = {}
    for name, value in (written | given).items():
        try:
            values[name] = coerce(name, hints[name], value)
        except ValueError as error:
            faults += config_errors(error)
    if not faults:
        cluster = Cluster(**values)
        faults += _faults(cluster)
    if faults:
        raise ConfigErrors(faults)
    return cluster, left, shown


def _file(path: str | None, known: Any, faults: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    values, lines = read_yaml(path, lambda name: False)
    found = {}
    for name, value in values.items():
        if (ours := name.replace(".", "_")) in known:
            found[ours] = value
        else:
            where = lines.get(name, f"{path}: ")
            faults.append(f"{where}{name} is no option of a cluster{suggest(ours, known)}")
    return found


def _allocated(mode: str, faults: list[str]) -> dict[str, int]:
    """The GPUs in AReaL's allocation string: `sglang.d4p1t1+d4p1t1`, `vllm:d2t2+fsdp:d4`."""
    found = _ALLOCATION.fullmatch(mode.strip())
    if found is None or not found["ours"]:
        faults.append(
            f"allocation_mode is {mode!r}; what is read is ENGINE.dXtYpZ+dXtYpZ, of an engine and "
            "of the trainer (engine_gpus, trainer_gpus)"
        )
        return {}
    sizes = {}
    for part in ("ours", "theirs"):
        sizes[part] = {
            letter: int(n) for letter, n in re.findall(r"([dtpc])(\d+)", found[part] or "")
        }
        if sizes[part].get("p", 1) != 1:
            faults.append("allocation_mode has pipeline parallelism, of which there is none here")
    for letter, what, option in (
        ("t", "the trainer's matrices", "tp_size"),
        ("c", "the trainer's sequences", "sp_size"),
    ):
        if (parts := sizes["ours"].get(letter, 1)) != 1:
            faults.append(
                f"allocation_mode divides {what} among {parts} GPUs ({letter}{parts}); give the "
                f"run parallel_kwargs.{option} {parts}, and the launcher all GPUs of the trainer "
                "(trainer_gpus)"
            )
    theirs = sizes["theirs"]
    engines = theirs.get("d", 1) * theirs.get("t", 1) if theirs else 0
    return {"trainer_gpus": sizes["ours"].get("d", 1), "engine_gpus": engines}


def _faults(cluster: Cluster) -> list[str]:
    """The faults of a cluster's options."""
    c, found = cluster, []
    least = {
        "nodes": 1, "gpus_per_node": 0, "engine_gpus": 0, "scorers": 0, "slurm_signal": 0,
        "slurm_restarts": 0, "slurm_chain": 1, "slurm_max_requeues": 0, "ray_restarts": 0,
    }  # fmt: skip
    for name, number in least.items():
        if getattr(c, name) < number:
            found.append(f"{name} is {getattr(c, name)}; it must be at least {number}")
    for name in ("trainer_gpus", "threads"):
        if (value := getattr(c, name)) is not None and value < 1:
            found.append(f"{name} is {value}; it must be at least 1")
    # A Slurm job adds 16 times the last three digits of its number, and one for each server.
    last = 49_000 if c.backend == "slurm" else 64_000
    if not 1024 <= c.port <= last:
        found.append(f"port is {c.port}; with backend {c.backend} it is from 1,024 to {last:,}")
    if c.backend == "local" and c.nodes > 1:
        found.append(f"nodes is {c.nodes} and backend is local, which is this machine (backend)")
    total, wanted = c.nodes * c.gpus_per_node, c.trainers + c.engine_gpus
    if c.gpus_per_node and wanted > total:
        found.append(
            f"trainer_gpus {c.trainers} and engine_gpus {c.engine_gpus} are {wanted} GPUs, and "
            f"nodes {c.nodes} with gpus_per_node {c.gpus_per_node} have {total}"
        )
    if c.nodes > 1 and c.gpus_per_node and c.backend == "slurm":
        found += [
            f"{name} is {value} on nodes of {c.gpus_per_node} GPUs; of several nodes each trains "
            f"or samples as a whole: give a multiple ({name})"
            for name, value in (("trainer_gpus", c.trainers), ("engine_gpus", c.engine_gpus))
            if value % c.gpus_per_node
        ]
    return found + _slurm_faults(cluster)


def _slurm_faults(c: Cluster) -> list[str]:
    """The faults of the options of Slurm."""
    found = []
    for name in _ONE_LINE:
        if (value := getattr(c, name)) is not None and (reason := unsafe(value)):
            found.append(f"{name} is {value!r}; {reason}")
    if c.slurm_mem is not None and not _MEMORY.fullmatch(c.slurm_mem):
        found.append(f"slurm_mem is {c.slurm_mem!r}; it must be a number with K, M, G or T, as 64G")
    if c.slurm_gres is not None and not (c.gpus_per_node and _GRES.fullmatch(c.slurm_gres)):
        found.append(
            f"slurm_gres is {c.slurm_gres!r} and gpus_per_node {c.gpus_per_node}; give gpu or "
            "gpu:TYPE, since the number is gpus_per_node, above 0"
        )
    if c.slurm_container and c.slurm_container_image:
        found.append("slurm_container and slurm_container_image are both given; give one of them")
    for name in ("slurm_options", "slurm_engine_options", "slurm_srun_options"):
        for text in getattr(c, name) or []:
            try:
                split_option(text)
            except ValueError as error:
                found.append(f"{name} has {text!r}; {error}")
    if c.slurm_array is not None and c.slurm_chain > 1:
        found.append("slurm_array and slurm_chain are both given; a chain is of one run")
    if c.slurm_engine_options is not None and not (c.engine_gpus and c.nodes > 1):
        found.append(
            "slurm_engine_options is given, and no node samples alone (engine_gpus, nodes above 1)"
        )
    return found
