"""The native or hf engine in separate processes, built from a run's options."""

from __future__ import annotations

import torch

from rloo.distributed.sharded_tensor import shape_of
from rloo.engines.engine_worker import engine_worker_config
from rloo.engines.native import support
from rloo.engines.native.fused_decoder import can_fuse
from rloo.engines.remote_engine import RemoteEngine, RemoteEngineConfig
from rloo.engines.vllm.from_options import weights_folder
from rloo.model.export import PolicyExport
from rloo.model.policy import Policy


def make_apart(policy: Policy, precision: torch.dtype | None) -> RemoteEngine:
    """The native or hf engine in separate processes, with the autocast `precision`. Raises
    ValueError if `rollout_dtype` is set and the fused decoder does not sample the model."""
    config, model = policy.config, policy.model
    why_slow = None
    if config.rollout_engine != "hf":
        with policy.gathered_weights(in_turn=True):
            why_slow = support.unavailable_reason(model, fused=False)
    if why_slow is not None:
        policy.notes.append(
            "sampling with transformers' generate, which is slower: the native engine does not "
            f"support this model, {why_slow}"
        )
    engine = "hf" if config.rollout_engine == "hf" or why_slow is not None else "native"
    fused = engine == "native" and can_fuse(model)
    if config.rollout_dtype and not fused:
        raise ValueError(
            f"rollout_dtype is {config.rollout_dtype}; only the native engine's fused decoder has "
            f"a precision of its own, and {type(model).__name__} is not sampled by it "
            "(rollout_dtype, rollout_engine)"
        )
    if engine == "native" and not fused:
        policy.notes.append(
            f"sampling runs {type(model).__name__} layer by layer, which is slower: its arithmetic "
            "is not among those that are fused"
        )
    if config.max_staleness:
        policy.notes.append(
            "sampling goes on beside training (max_staleness): which weights sample a group "
            "depends on time, so that two runs, or a resumed one, are not equal bit for bit"
        )
    computed = str(precision).removeprefix("torch.") if precision else None
    placed = config.async_options.remote_workers in ("sample", "both")
    hub = policy.world.worker_registry if placed else None
    how = engine_worker_config(
        model,
        engine=engine,
        # A remote worker sees only its own GPUs, so the device has no index.
        device=policy.device.type if hub else str(policy.device),
        pad_token_id=policy.pad_token_id,
        precision=computed,
        dtype=config.rollout_dtype or computed,
        trust_remote_code=config.trust_remote_code,
    )
    source = PolicyExport(policy, torch.float32, merge=True)
    workers = RemoteEngineConfig(
        config.sampler_processes or 1,
        hub,
        seconds=config.ddp_timeout,
        folder=weights_folder(config) if placed else None,
        room=4 * sum(shape_of(p).numel() for p in model.parameters()),
        # A step changes all trained values of 32 bits, so deltas only leave out frozen weights.
        deltas=policy.adapter is not None,
    )
    return RemoteEngine(how, source, workers)
