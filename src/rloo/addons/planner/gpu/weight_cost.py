"""Seconds until the engines have the weights of a step.

Sharded weights are gathered first. Then they go one of three ways. An engine in the trainer's
process copies them on the GPU. Servers on the trainer's GPUs read files, which the main process
writes; so do all servers for an adapter (`rloo.engines.vllm.from_options`). For servers on other
GPUs the main process writes files, too, and sends the weights over NCCL; only servers that cannot
receive at that moment read the files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rloo.addons.planner.gpu.cost_model import ENGINE, WEIGHTS

if TYPE_CHECKING:
    from rloo.addons.planner.gpu.cost_model import RolloutCost


def publishing(
    job: RolloutCost, trainers: int, parallel: int = 1, *, divided: bool, apart: bool
) -> float:
    """Seconds until engines of `parallel` GPUs have new weights. `divided`: the weights are sharded
    among `trainers` GPUs. `apart`: the engines have other GPUs than the trainers."""
    others = (trainers - 1) / trainers if divided else 0.0
    gathered = WEIGHTS * job.sent * others / job.network(trainers)
    if apart:
        return gathered + (_by_files(job) if job.reads_files else _by_nccl(job))
    if job.sampler.files:
        return gathered + _by_files(job) + _wake_up(job, parallel)
    return gathered + _on_the_gpu(job)


def _by_nccl(job: RolloutCost) -> float:
    """The main process first writes the files, for servers that cannot receive at that moment."""
    size = ENGINE * job.sent
    written = size / job.rates["file_rate"] if job.sampler.files else 0.0
    return written + size / job.rates["weight_rate"]


def _by_files(job: RolloutCost) -> float:
    """Each process of each server reads all files. They do so at the same time."""
    size = ENGINE * job.sent
    return size / job.rates["file_rate"] + size / job.rates["load_rate"]


def _wake_up(job: RolloutCost, parallel: int) -> float:
    """A server of an adapter sleeps with its weights in host memory. Others drop their weights."""
    if not (job.sleeps and job.sends_adapter):
        return 0.0
    return job.copy_bytes / parallel / (job.gpu.host * job.rates["network_share"])


def _on_the_gpu(job: RolloutCost) -> float:
    """An adapter is merged into all of a copy."""
    moved: float = (WEIGHTS + ENGINE) * job.trained
    if job.adapter and job.sampler.copies:
        moved += (job.memory.read + ENGINE) * job.shape.parameters
    return moved / job.gpu.bandwidth
