"""Options of asynchronous rollouts: default importance weights, and invalid combinations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rloo.config.engine_spec import engine_spec
from rloo.config.options import TrainingOptions


def correction_of(options: TrainingOptions) -> dict[str, Any]:
    """The resolved `rollout_importance_sampling_mode`; empty if the value does not change. If
    rollouts may be stale, the default is truncated importance weights (the decoupled objective of
    AReaL, arXiv 2505.24298, section 5.2): one per sequence if `importance_sampling_level` is
    sequence, else one per token. If rollouts cannot be stale, the default is no weights."""
    mode = options.rollout_importance_sampling_mode
    if mode == "off" and not options.max_staleness:
        return {"rollout_importance_sampling_mode": None}
    if mode is not None or not options.max_staleness:
        return {}
    unit = "sequence" if options.importance_sampling_level == "sequence" else "token"
    return {"rollout_importance_sampling_mode": f"{unit}_truncate"}


def check_beside(config: TrainingOptions) -> None:
    """Raise ValueError for the first fault in the options of `config` for asynchronous rollouts."""
    for fault in _faults(config):
        raise ValueError(fault)


def _faults(config: TrainingOptions) -> Iterator[str]:
    stale, engine, beside = config.max_staleness, config.rollout_engine, config.async_options
    mode, spec = config.rollout_importance_sampling_mode, engine_spec(engine)
    if mode == "off":
        yield (
            f"max_staleness is {stale} and rollout_importance_sampling_mode is off; what older "
            "weights have sampled is trained with a correction, or the gradient is that of "
            "another objective (rollout_importance_sampling_mode null is truncated weights)"
        )
    if beside.ess_guard and mode is None:
        yield (
            "async_kwargs.ess_guard is true and there are no weights to see a sample size in "
            "(rollout_importance_sampling_mode, or max_staleness above 0)"
        )
    if beside.ess_guard and config.parallel.startswith("zero"):
        yield (
            f"async_kwargs.ess_guard is true and parallel is {config.parallel}; DeepSpeed's step "
            "has its own learning rate (async_kwargs.ess_guard, or parallel fsdp2)"
        )
    if config.sampler_processes and spec.own_processes:
        yield (
            f"sampler_processes is {config.sampler_processes} and rollout_engine is {engine}, "
            "whose servers are processes of their own; remove it (sampler_processes)"
        )
    if beside.remote_workers in ("sample", "both") and spec.own_processes:
        yield (
            f"async_kwargs.remote_workers is {beside.remote_workers} and rollout_engine is "
            f"{engine}; its servers, wherever they run, are given by address "
            "(vllm_server_base_url; async_kwargs.remote_workers score)"
        )
    if beside.partial_rollouts and not (stale and spec.partial_rollouts):
        yield (
            f"async_kwargs.partial_rollouts is true, rollout_engine is {engine} and max_staleness "
            f"{stale}; it is about what vLLM has under way when weights change (rollout_engine "
            "vllm or vllm_server, and max_staleness above 0)"
        )
    if stale and config.sampler_processes == 0 and not spec.own_processes:
        yield (
            f"max_staleness is {stale} and sampler_processes is 0; in one process nothing is "
            "sampled while the model is trained (max_staleness, sampler_processes)"
        )
    if not config.samples_beside:
        for name in ("reward_workers", "remote_workers"):
            if (value := getattr(beside, name)) is not None:
                yield (
                    f"async_kwargs.{name} is {value}, and the run's own process samples and calls "
                    "rewards; it is for max_staleness above 0, or sampler_processes"
                )
        return
    if (copies := config.engine_options.copy_weights) is not None:
        yield (
            f"engine_kwargs.copy_weights is {copies} and another process samples, which always has "
            "a copy (engine_kwargs.copy_weights, max_staleness, sampler_processes)"
        )
