"""What a run's options say of vLLM's servers."""

from __future__ import annotations

from pathlib import Path

import torch

from rloo.config.config import RLOOConfig
from rloo.config.vllm_options import servers_dtype, tolerance_of
from rloo.engines.vllm.engine import Settings
from rloo.engines.vllm.serving import Serving
from rloo.model.export import Exported, tied_outputs
from rloo.model.policy import Policy
from rloo.run.folder import LOGS


def serving_of(
    config: RLOOConfig,
    model: str,
    lora_rank: int | None = None,
    *,
    tied: bool = False,
    sleeps: bool = False,
) -> Serving:
    """How a server of `model` is started for a run of these options. See `Serving`."""
    return Serving(
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
        arguments=tuple(config.vllm_serve_args or ()),
        executable=tuple(config.vllm_executable),
    )


def exported(policy: Policy) -> Exported:
    """The policy as servers take it."""
    config = policy.config
    dtype = getattr(torch, servers_dtype(config))
    return Exported(policy, dtype, merge=bool(config.vllm_merge_adapter), untie=must_untie(policy))


def must_untie(policy: Policy) -> bool:
    """Whether servers are told to take a tied matrix for two: on a CPU vLLM packs it once."""
    return policy.device.type == "cpu" and bool(tied_outputs(policy.model))


def settings_of(policy: Policy, source: Exported) -> Settings:
    """How a run finds its servers, and for how long it waits for them."""
    config = policy.config
    size, given = config.vllm_tensor_parallel_size, config.vllm_devices
    devices: list[str | None] = [None]
    if given is not None:
        devices = [",".join(given[at : at + size]) for at in range(0, len(given), size)]
    model = config.model or "MODEL"
    sleeps = config.vllm_enable_sleep_mode
    if sleeps is None:
        shares = config.rollout_engine == "vllm" and config.vllm_devices is None
        sleeps = shares and policy.device.type == "cuda"
    rank = source.adapter_rank
    serving = serving_of(config, model, rank, tied=source.untie, sleeps=sleeps)
    longest = max(config.max_completion_length, config.eval_max_completion_length or 0)
    folder = Path(config.output_dir).absolute()
    weights = Path(config.vllm_weights_dir).absolute() if config.vllm_weights_dir else None
    if weights is None and config.rollout_engine == "vllm_server":
        weights = folder
    return Settings(
        serving,
        urls=tuple(config.vllm_server_base_url or ()),
        devices=tuple(devices),
        deadline=config.vllm_request_timeout,
        start_deadline=config.vllm_server_timeout,
        restarts=config.vllm_restarts,
        tolerance=tolerance_of(config),
        needed=longest + (config.max_prompt_length or 1),
        # vLLM loses adapters with the weights that level 2 drops.
        sleep_level=(2 if rank is None else 1) if sleeps else None,
        weights_folder=weights,
        log_folder=folder / LOGS,
    )
