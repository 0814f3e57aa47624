"""What a run's options say of engines in other processes: one that we start, or vLLM's servers."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from rloo.config.config import RLOOConfig
from rloo.config.vllm_options import servers_dtype, tolerance_of
from rloo.data.tasks import resolve_model
from rloo.distributed.sharded_tensor import shape_of
from rloo.distributed.standard_streams import say
from rloo.engines.engine_worker import engine_worker_config
from rloo.engines.native import support
from rloo.engines.native.fused_decoder import can_fuse
from rloo.engines.remote_engine import RemoteEngine, RemoteEngineConfig
from rloo.engines.vllm import nccl
from rloo.engines.vllm.server_process import HERE, ServerConfig, guarded_environment, require_key
from rloo.engines.vllm.vllm_engine import VLLMSettings
from rloo.model.export import PolicyExport, tied_outputs
from rloo.model.policy import Policy
from rloo.tracking.jsonl import LOGS


def serving_of(
    config: RLOOConfig,
    model: str,
    lora_rank: int | None = None,
    *,
    tied: bool = False,
    sleeps: bool = False,
) -> ServerConfig:
    """How a server of `model` is started for a run of these options. See `ServerConfig`."""
    return ServerConfig(
        model,
        dtype=servers_dtype(config),
        max_model_length=config.vllm_max_model_length,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        model_impl=config.vllm_model_impl,
        lora_rank=lora_rank,
        sleeps=sleeps,
        trust_remote_code=config.trust_remote_code,
        tied=tied,
        tells=config.async_options.partial_rollouts,
        arguments=tuple(config.engine_options.serve_args or ()),
        executable=tuple(config.engine_options.executable),
    )


def exported(policy: Policy) -> PolicyExport:
    """The policy as servers take it."""
    config = policy.config
    dtype = getattr(torch, servers_dtype(config))
    return PolicyExport(
        policy, dtype, merge=bool(config.engine_options.merge_adapter), untie=must_untie(policy)
    )


def serving_alone(config: RLOOConfig, name: str) -> ServerConfig:
    """How `rloo vllm-serve` starts a server of the model `name` for runs that are elsewhere.
    Raises OSError for one whose configuration is not to be had."""
    model = resolve_model(name)
    known = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    tied = known.get_text_config().tie_word_embeddings and not torch.cuda.is_available()
    rank, sleeps = config.lora_r if config.use_peft else None, bool(config.vllm_enable_sleep_mode)
    return serving_of(config, model, rank, tied=tied, sleeps=sleeps)


def serve(config: RLOOConfig, model: str, *, named: bool) -> None:
    """Have this process become a server of `model`, after its line was printed. It listens where
    `vllm_server_host` says, if that is `named` or no default, and else on this machine alone.
    Raises ValueError where others could reach it without a key."""
    host = config.vllm_server_host
    host = host if named or host != RLOOConfig().vllm_server_host else HERE
    require_key(host)
    serving, port = serving_alone(config, model).guarded(), config.vllm_server_port
    environment = guarded_environment()
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    command = serving.command(host, port)
    say(f"{settings} {shlex.join(command)}")
    serving.require_program()
    os.environ.update(environment)
    os.execvp(command[0], command)


def must_untie(policy: Policy) -> bool:
    """Whether servers are told to take a tied matrix for two: on a CPU vLLM packs it once."""
    return policy.device.type == "cpu" and bool(tied_outputs(policy.model))


def settings_of(policy: Policy, source: PolicyExport) -> VLLMSettings:
    """How a run finds its servers, and for how long it waits for them."""
    config = policy.config
    size, given = config.vllm_tensor_parallel_size, config.engine_options.devices
    devices: list[str | None] = [None]
    if given is not None:
        devices = [",".join(given[at : at + size]) for at in range(0, len(given), size)]
    model = config.model or "MODEL"
    sleeps = config.vllm_enable_sleep_mode
    if sleeps is None:
        shares = config.rollout_engine == "vllm" and config.engine_options.devices is None
        sleeps = shares and policy.device.type == "cuda" and not config.max_staleness
    rank = source.adapter_rank
    if config.async_options.partial_rollouts and rank is not None:
        raise ValueError(
            "async_kwargs.partial_rollouts is true and an adapter travels alone; a completion "
            "goes on with the adapter by whose name it was begun (async_kwargs.partial_rollouts, "
            "or engine_kwargs.merge_adapter true)"
        )
    transfers = config.engine_options.weight_transfer != "files"
    reason = _nccl_unavailable_reason(policy, rank) if transfers else None
    if reason is not None and config.engine_options.weight_transfer == "nccl":
        policy.notes.append(f"weights go to the servers by files, not over NCCL: {reason}")
    serving = serving_of(config, model, rank, tied=source.untie, sleeps=sleeps)
    serving = replace(serving, transfers=transfers and reason is None)
    longest = max(config.max_completion_length, config.eval_options.max_completion_length or 0)
    folder = Path(config.output_dir).absolute()
    elsewhere = config.rollout_engine == "vllm_server" or config.engine_options.weights_dir
    weights = _weights_folder(config) if elsewhere else None
    return VLLMSettings(
        serving,
        urls=tuple(config.vllm_server_base_url or ()),
        devices=tuple(devices),
        deadline=config.engine_options.request_timeout,
        start_deadline=config.vllm_server_timeout,
        restarts=config.engine_options.restarts,
        tolerance=tolerance_of(config),
        needed=longest + (config.max_prompt_length or 1),
        partial=config.async_options.partial_rollouts,
        # vLLM loses adapters with the weights that level 2 drops.
        sleep_level=(2 if rank is None else 1) if sleeps else None,
        weights_folder=weights,
        log_folder=folder / LOGS,
    )


def _nccl_unavailable_reason(policy: Policy, lora_rank: int | None) -> str | None:
    """Why weights cannot go over NCCL, None where they may."""
    config = policy.config
    if lora_rank is not None:
        return "an adapter travels as the files that vLLM loads"
    if config.rollout_engine == "vllm" and config.engine_options.devices is None:
        return "the servers have the trainer's own GPU (engine_kwargs.devices)"
    return nccl.unavailable_reason(policy.device)


def make_apart(policy: Policy, precision: torch.dtype | None) -> RemoteEngine:
    """The native engine, or hf, in a process of its own, with the autocast `precision`."""
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
        # One that is placed sees the GPUs that it may use.
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
        folder=_weights_folder(config) if placed else None,
        room=4 * sum(shape_of(p).numel() for p in model.parameters()),
    )
    return RemoteEngine(how, source, workers)


def _weights_folder(config: RLOOConfig) -> Path:
    """Where weights are written for processes on other machines."""
    return Path(config.engine_options.weights_dir or config.output_dir).absolute()
