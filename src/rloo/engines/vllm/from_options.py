"""Builds the settings of vLLM servers from a run's options."""

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
from rloo.distributed.standard_streams import say
from rloo.engines.vllm.nccl import unavailable_reason
from rloo.engines.vllm.server_process import HERE, ServerConfig, guarded_environment, require_key
from rloo.engines.vllm.vllm_engine import VLLMSettings
from rloo.model.export import PolicyExport, tied_outputs
from rloo.model.policy import Policy


def serving_of(
    config: RLOOConfig,
    model: str,
    lora_rank: int | None = None,
    *,
    tied: bool = False,
    sleeps: bool = False,
) -> ServerConfig:
    """The `ServerConfig` of a server of `model` for a run with these options."""
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
    """The policy's export in the form that servers load."""
    config = policy.config
    dtype = getattr(torch, servers_dtype(config))
    return PolicyExport(
        policy, dtype, merge=bool(config.engine_options.merge_adapter), untie=must_untie(policy)
    )


def serving_alone(config: RLOOConfig, name: str) -> ServerConfig:
    """The `ServerConfig` of a server that `rloo vllm-serve` starts with the model `name`. Raises
    OSError if the model's configuration cannot be loaded."""
    model = resolve_model(name)
    known = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    tied = known.get_text_config().tie_word_embeddings and not torch.cuda.is_available()
    rank, sleeps = config.lora_r if config.use_peft else None, bool(config.vllm_enable_sleep_mode)
    return serving_of(config, model, rank, tied=tied, sleeps=sleeps)


def serve(config: RLOOConfig, model: str, *, named: bool) -> None:
    """Print the command line of a server of `model`, then replace this process by it. The server
    listens on `vllm_server_host` if the user has `named` this option or its value is not the
    default, otherwise on the loopback address. Raises ValueError if other machines could reach the
    server without a key."""
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
    """Whether servers must treat a tied matrix as two matrices: on a CPU, vLLM packs the output
    matrix only once, so later versions of a tied matrix would have no effect."""
    return policy.device.type == "cpu" and bool(tied_outputs(policy.model))


def settings_of(policy: Policy, log_folder: Path) -> tuple[VLLMSettings, PolicyExport]:
    """The `VLLMSettings` of a run, and the export of its policy for the servers."""
    config, source = policy.config, exported(policy)
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
            "partial_rollouts is true and an adapter travels alone; a completion goes on with the "
            "adapter by whose name it was begun (async_kwargs.partial_rollouts, or "
            "engine_kwargs.merge_adapter true)"
        )
    transfers = config.engine_options.weight_transfer != "files"
    reason = _why_by_files(policy, rank) if transfers else None
    if reason is not None and config.engine_options.weight_transfer == "nccl":
        policy.notes.append(f"weights go to the servers by files, not over NCCL: {reason}")
    serving = serving_of(config, model, rank, tied=source.untie, sleeps=sleeps)
    serving = replace(serving, transfers=transfers and reason is None)
    longest = max(config.max_completion_length, config.eval_options.max_completion_length or 0)
    elsewhere = config.rollout_engine == "vllm_server" or config.engine_options.weights_dir
    weights = weights_folder(config) if elsewhere else None
    settings = VLLMSettings(
        serving,
        urls=tuple(config.vllm_server_base_url or ()),
        devices=tuple(devices),
        deadline=config.engine_options.request_timeout,
        start_deadline=config.vllm_server_timeout,
        restarts=config.engine_options.restarts,
        tolerance=tolerance_of(config),
        needed=longest + (config.max_prompt_length or 1),
        partial=config.async_options.partial_rollouts,
        # Level 2 drops the weights, and vLLM then also loses its adapters.
        sleep_level=(2 if rank is None else 1) if sleeps else None,
        weights_folder=weights,
        log_folder=log_folder,
    )
    return settings, source


def _why_by_files(policy: Policy, lora_rank: int | None) -> str | None:
    """Why weights cannot be sent over NCCL, or None if they can."""
    config = policy.config
    if lora_rank is not None:
        return "an adapter travels as the files that vLLM loads"
    if config.rollout_engine == "vllm" and config.engine_options.devices is None:
        return "the servers have the trainer's own GPU (engine_kwargs.devices)"
    return unavailable_reason(policy.device)


def weights_folder(config: RLOOConfig) -> Path:
    """The folder into which weights are written for processes on other machines."""
    return Path(config.engine_options.weights_dir or config.output_dir).absolute()
