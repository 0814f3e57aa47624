"""The CPUs and the host memory that a Slurm job with GPUs requests, counted from the run."""

from __future__ import annotations

from dataclasses import dataclass

from rloo.addons.launch.roles import LaunchJob, Role
from rloo.config.batch_sizes import batches_of
from rloo.config.file_checks import reading
from rloo.data.tasks import configuration_of

# Assumed, without a source: bytes of a training process with a CUDA context, and of a vLLM server
# or a sampling process, both without weights; a margin for pinned memory, data and tokenizers.
_RANK, _ENGINE, _MARGIN = 5e9, 10e9, 1.25
# Bytes per parameter: float32 weights that a rank loads before its GPU has them; weights and AdamW
# moments that the main process gathers for a checkpoint; three versions of 16-bit weights for
# engines, in shared memory; weights of a server that sleeps, or that a sampling process loads.
_LOADED, _SAVED, _PUBLISHED, _COPY = 4, 12, 6, 4


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The CPUs of each process, and the memory of each node in GiB."""

    cpus: int
    memory: int


def node_needs(job: LaunchJob) -> NodeNeeds:
    """The needs of a job on GPUs. Raises ValueError if the model's configuration cannot be
    read."""
    parameters = _parameters(job)
    nodes = {role.first for role in (job.trainer, *job.others)}
    memory = max(_memory(job, parameters, node) for node in nodes)
    cpus = max(_cpus(job, role) for role in (job.trainer, *job.others))
    return NodeNeeds(cpus, -int(-_MARGIN * memory // 2**30))


def _memory(job: LaunchJob, parameters: int, node: int) -> float:
    """Bytes on the first node of a role: the larger one of loading and training."""
    here = {role.name: role.per_node for role in (job.trainer, *job.others) if role.first == node}
    ranks, engines = here.get("trainer", 0), here.get("server", 0) + here.get("sampler", 0)
    if ranks and _colocated(job):
        engines = -(-ranks // job.config.vllm_tensor_parallel_size)
    fixed = ranks * _RANK + engines * _ENGINE
    loading = ranks * _LOADED * parameters
    training = (_SAVED + _PUBLISHED) * parameters if ranks else 0
    moved = 16 if "params" in job.config.offload else 8 if "optimizer" in job.config.offload else 0
    sharing = 1 if job.config.parallel == "replicate" else job.trainer.count
    training += ranks * moved * parameters // sharing
    return fixed + max(loading, training + engines * _COPY * parameters)


def _cpus(job: LaunchJob, role: Role) -> int:
    """A thread of Python and one of torch; for a server its HTTP server, its scheduler and one
    worker per GPU; on the trainer also those of a colocated server, or the share of each rank in
    the processes that call reward functions for its node."""
    if role.name == "server":
        return 2 + role.gpus
    if role.name == "scorer":
        return 1
    server = 2 + job.config.vllm_tensor_parallel_size
    workers = server if role is job.trainer and _colocated(job) else 0
    if role is job.trainer and (scoring := reward_processes(job)):
        workers = -(-scoring // role.per_node)
    return 2 + workers


def reward_processes(job: LaunchJob) -> int:
    """The number of processes that the main process starts to call reward functions."""
    beside = job.config.samples_beside or any(other.name == "sampler" for other in job.others)
    if not beside or job.cluster.scorers:
        return 0
    rollout = batches_of(job.config, job.trainer.count).prompts_per_rollout
    return job.config.async_options.reward_workers or min(rollout, 8)


def _colocated(job: LaunchJob) -> bool:
    """Whether the ranks start vLLM servers on their GPUs."""
    return job.config.rollout_engine == "vllm" and job.servers is None


def _parameters(job: LaunchJob) -> int:
    from rloo.engines.vllm.server_memory import count_parameters

    config = job.config
    if config.model is None:
        raise ValueError("there is no model (model)")
    found = configuration_of(config.model, config)
    with reading(f"the model {config.model}", "model"):
        return count_parameters(found, trust_remote_code=config.trust_remote_code)
