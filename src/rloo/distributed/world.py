"""World: the processes of a run, and the device of this process. The trainer creates the World once
and passes it on. No other module queries a device or a rank."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from rloo.distributed.gradient_buckets import GradientBuckets
    from rloo.distributed.group_setup import SequenceGroup, ShardingGroups, TensorGroup
    from rloo.distributed.process_group import Collectives
    from rloo.distributed.remote_pool import Registry

T = TypeVar("T")
# The environment variable that names a function (`module:function`) which returns the registry of
# workers. A launcher whose cluster has its own connections to the workers sets this variable.
REGISTRY = "RLOO_WORKER_REGISTRY"


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """The numbers of neighbouring processes that form a group: over which weights are sharded
    (None: all), that compute the same rows with slices of the tokens, and with shards of the
    matrices."""

    dp_shard_size: int | None = None
    sp_size: int = 1
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class World:
    """Process `rank` of `size`, which computes on `device`. `collectives` connect this process to
    the others. `device_groups` has the mesh of all processes if weights are sharded. Under sequence
    parallelism, `sequence_group` are the processes that compute the same rows, and under tensor
    parallelism `tensor_group`. Workers that are started outside of the run connect to the
    `worker_registry` of the main process.

    Every method but `share`, `fail` and `gradient_buckets` is a collective: all processes call it
    at the same point, with values of the same form, and get the same result. A single process gets
    its own value. A collective raises `RankError` if another process has failed, is gone, or does
    not arrive within `ddp_timeout`. All later collectives then raise at once.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    collectives: Collectives | None = None
    device_groups: ShardingGroups | None = None
    worker_registry: Registry | None = None
    sequence_group: SequenceGroup | None = None
    tensor_group: TensorGroup | None = None

    @property
    def num_row_groups(self) -> int:
        """The number of groups of processes that compute different rows: without sequence or tensor
        parallelism, each process is a group."""
        return self.size // self._group_size

    @property
    def row_group(self) -> int:
        """The index of this process's group."""
        return self.rank // self._group_size

    @property
    def leads_row_group(self) -> bool:
        """Whether this process reports the results that its group has in common."""
        return self.rank % self._group_size == 0

    @property
    def _group_size(self) -> int:
        group = self.sequence_group or self.tensor_group
        return 1 if group is None else group.size

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints for the user."""
        return self.rank == 0

    def share(self, count: int, rank: int | None = None) -> range:
        """The indices among `count` items that belong to this process or to `rank`. Parts are equal
        and in the order of ranks."""
        rank = self.rank if rank is None else rank
        return range(rank * count // self.size, (rank + 1) * count // self.size)

    def all_gather_object(self, value: T) -> list[T]:
        """The value of every process, in the order of ranks."""
        return [value] if self.collectives is None else self.collectives.all_gather_object(value)

    def broadcast_object(self, value: T) -> T:
        """The value of the main process. The main process returns its value even if another process
        is gone; its next collective then raises RankError."""
        try:
            return self.all_gather_object(value if self.is_main else None)[0]  # type: ignore[return-value]
        except ConnectionError:  # RankError
            if not self.is_main:
                raise
            return value

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true in at least one process."""
        return any(self.all_gather_object(flag))

    def run_on_all_ranks(
        self, work: Callable[[], T], then: Callable[[], object] = lambda: None
    ) -> list[T]:
        """The results of `work` in every process, or one for each group of processes that compute
        the same rows, whose results are equal. If one process runs out of memory, all raise
        torch.OutOfMemoryError, so that all react in the same way. `then` starts collectives; it is
        called before results are exchanged, also if `work` ran out of memory."""
        if self.collectives is None:
            return [work()]
        # If one runs out of memory, the others hang in a collective of `work`.
        if self._group_size > 1:
            mine = [work()]
            then()
            found = self.all_gather_object(mine if self.leads_row_group else [])
            return [result for results in found for result in results]
        if self.device_groups is not None:
            return self.all_gather_object(work())
        import torch

        from rloo.distributed.process_group import AllOutOfMemory

        try:
            done: list[T] = [work()]
        except torch.OutOfMemoryError:
            done = []
        then()
        results = self.all_gather_object(done)
        if not all(results):
            short = [str(rank) for rank, result in enumerate(results) if not result]
            raise AllOutOfMemory(f"rank {', '.join(short)} ran out of memory")
        return [result for (result,) in results]

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report an error in this block to the other processes."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Report to the other processes that still run why this process ends."""
        if self.collectives is not None:
            self.collectives.fail(error)

    def end(self) -> None:
        """Wait until the main process has ended its run and saved everything."""
        if self.collectives is not None:
            self.collectives.end()

    def require_device_groups(self) -> None:
        """Raise ValueError if an error has ended a collective of torch in some, but not all
        processes."""
        if self.collectives is not None and self.collectives.left_behind:
            raise ValueError(
                "an error in the midst of a step has broken the lines by which weights are "
                "divided, which are made once; start the processes again (parallel, max_restarts)"
            )

    def mesh(self) -> DeviceMesh:
        """The mesh of all processes, with its own groups, for sharded weights. It has one
        dimension, or two under HSDP: replicas and shards."""
        return self._sharding_groups.mesh

    def mesh_group(self) -> ProcessGroup:
        """The group of all processes of the mesh."""
        group: ProcessGroup = self._sharding_groups.all_ranks
        return group

    @property
    def _sharding_groups(self) -> ShardingGroups:
        assert self.device_groups is not None, "parallel"
        return self.device_groups

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """A context for collectives inside torch, which handle no signal and do not notice errors
        of other processes. All processes enter the context, or none if one process received a stop
        signal. Signals are deferred to the end of the context. After an error in the context, the
        collectives of the processes no longer match."""
        if self.collectives is None:
            yield
        else:
            with self.collectives.in_step():
                yield

    def regroup(self, value: T) -> list[T] | None:
        """The values of all processes, at the end of a run. None if a process is gone, does not
        arrive, or had an error inside `in_step`."""
        return [value] if self.collectives is None else self.collectives.regroup(value)

    def gradient_buckets(self, parameters: Sequence[torch.Tensor]) -> GradientBuckets | None:
        """The buckets in which gradients of these parameters are summed over the processes. None if
        there is a single process, or if weights are sharded."""
        if self.collectives is None or self.device_groups is not None:
            return None
        from rloo.distributed.gradient_buckets import GradientBuckets

        group = None if self.tensor_group is None else self.tensor_group.replicas
        return GradientBuckets(parameters, self.collectives, group=group)


def process_count() -> int:
    """The number of processes that train together (WORLD_SIZE), with any launcher."""
    return _number("WORLD_SIZE", 1)


def process_rank() -> int:
    """The rank of this process (RANK)."""
    return _number("RANK", 0)


def rank_here() -> int:
    """The rank of this process among the processes on this machine (LOCAL_RANK)."""
    return _number("LOCAL_RANK", 0)


def processes_here() -> int:
    """The number of the run's processes on this machine (LOCAL_WORLD_SIZE)."""
    return _number("LOCAL_WORLD_SIZE", process_count())


def _number(name: str, default: int) -> int:
    """The number in an environment variable. `rloo.config.launcher_env` rejects other values, with
    an error that names the variable."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def device_here(*, use_cpu: bool) -> torch.device:
    """The device of this process: the CPU if `use_cpu` is true or there is no GPU, otherwise its
    GPU."""
    import torch

    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank_here()) if process_count() > 1 else torch.device("cuda")


NO_GROUPS = GroupSizes()


def make_world(
    *,
    use_cpu: bool,
    timeout: float = 1800.0,
    divides: bool = False,
    groups: GroupSizes = NO_GROUPS,
    workers: str | None = None,
) -> World:
    """The World of this process, on the device of `device_here`. A process waits at most `timeout`
    seconds for the others. `divides`: whether weights are sharded, also with a single process.
    `groups` has the sizes of the groups of neighbouring processes. `workers` is the folder in which
    remote workers find the main process's address; None if there are no remote workers. The
    environment variable REGISTRY replaces the registry."""
    for name, number in asdict(groups).items():
        if number is not None and process_count() % number:
            raise ValueError(
                f"{name} is {number} and the number of processes is {process_count()}, which it "
                f"must divide ({name}, num_processes)"
            )
    world = _connected(use_cpu, timeout, divides, groups)
    if workers is None or not world.is_main:
        return world
    if factory := os.environ.get(REGISTRY):
        module, _, function = factory.partition(":")
        return replace(world, worker_registry=getattr(importlib.import_module(module), function)())
    from rloo.distributed.worker_registry import WorkerRegistry

    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    return replace(world, worker_registry=WorkerRegistry(Path(workers).absolute(), host))


def _connected(use_cpu: bool, timeout: float, divides: bool, groups: GroupSizes) -> World:
    import torch

    device = device_here(use_cpu=use_cpu)
    rank, size = process_rank(), process_count()
    if size == 1 and not divides:
        return World(device)
    from rloo.distributed import group_setup
    from rloo.distributed.process_group import connect

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes_here()))
    if device.type == "cuda":
        device = torch.device("cuda", rank_here())
        if rank_here() >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK is {rank_here()} and there are {torch.cuda.device_count()} GPUs; each "
                "process needs its own (num_processes, or use_cpu)"
            )
        torch.cuda.set_device(device)
    if size == 1:
        group_setup.connect_alone(device)
        return World(device, device_groups=group_setup.sharding_groups(device, timeout))
    watched = divides or groups.sp_size > 1 or groups.tp_size > 1
    world = World(device, rank, size, connect(rank, size, timeout, device, watched=watched))
    if divides:
        sharding = group_setup.sharding_groups(device, timeout, groups.dp_shard_size)
        world = replace(world, device_groups=sharding)
    if (number := groups.sp_size) > 1:
        sequence = group_setup.sequence_group(rank, size, number, timeout)
        world = replace(world, sequence_group=sequence)
    if (number := groups.tp_size) > 1:
        tensors = group_setup.tensor_group(rank, size, number, timeout)
        world = replace(world, tensor_group=tensors)
    return world
