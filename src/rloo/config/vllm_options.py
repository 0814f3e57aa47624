"""Values that are derived from the vLLM options, including TRL's options that select vLLM."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from rloo.config.options import TrainingOptions

# The default of `vllm_gpu_memory_utilization`, the share of a GPU's memory that a server reserves.
# On the trainer's GPU: TRL's default for `vllm_mode colocate`. On separate GPUs: the default of
# `trl vllm-serve` (vLLM 0.32 itself: 0.92).
SHARED_GPU, SEPARATE_GPUS = 0.3, 0.9
# The values that vLLM accepts for --max-lora-rank.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def served_rank(rank: int) -> int:
    """The value of vLLM's --max-lora-rank for adapters of this rank, at most 512."""
    return next((allowed for allowed in _LORA_RANKS if allowed >= rank), _LORA_RANKS[-1])


def servers_dtype(options: TrainingOptions) -> str:
    """The dtype in which servers compute: `rollout_dtype`, or the trainer's dtype."""
    computed = "bfloat16" if options.bf16 else "float16" if options.fp16 else "float32"
    return options.rollout_dtype or computed


def tolerance_of(options: TrainingOptions) -> float:
    """The mean difference of log-probs at which a server's weights count as wrong, in nats."""
    in_float32 = servers_dtype(options) == "float32" and not (options.bf16 or options.fp16)
    return options.engine_options.tolerance or (1e-3 if in_float32 else 0.2)


def has_separate_gpus(options: TrainingOptions) -> bool:
    """Whether the servers of a run have other GPUs than the trainer: servers that the user starts,
    and servers that the run starts on `engine_kwargs.devices`."""
    return options.rollout_engine == "vllm_server" or options.engine_options.devices is not None


def shares_ranks_gpus(options: TrainingOptions) -> bool:
    """Whether the servers of a run have the GPUs of its ranks: each server those of
    `vllm_tensor_parallel_size` consecutive ranks, if there are several ranks."""
    on_them = options.rollout_engine == "vllm" and options.engine_options.devices is None
    return on_them and not options.max_staleness


def memory_share(options: TrainingOptions, *, separate: bool) -> float:
    """The share of a GPU's memory that a server reserves: `vllm_gpu_memory_utilization`, or a
    default, which depends on whether the servers have `separate` GPUs. On a CPU, vLLM reserves this
    share of the host memory, which the server shares with the trainer."""
    share = options.vllm_gpu_memory_utilization
    return (SEPARATE_GPUS if separate else SHARED_GPU) if share is None else share


def longest_completion(options: TrainingOptions) -> int:
    """The maximum number of tokens of a completion, in training and in evaluation."""
    return max(options.max_completion_length, options.eval_options.max_completion_length or 0)


def longest_sequence(options: TrainingOptions) -> int:
    """The number of tokens of the longest allowed prompt plus the longest completion. If prompts
    have no limit, the prompt counts as 1 token."""
    return (options.max_prompt_length or 1) + longest_completion(options)


def engine_of(options: TrainingOptions) -> dict[str, Any]:
    """The options `rollout_engine` and `vllm_server_base_url`, derived from TRL's use_vllm,
    vllm_mode, vllm_server_host and vllm_server_port. A `rollout_engine` or `vllm_server_base_url`
    that the user has set is kept. Without use_vllm, the other three options have no effect, as in
    TRL."""
    if not options.use_vllm or options.rollout_engine != "auto":
        return {}
    if options.vllm_mode == "colocate":
        return {"rollout_engine": "vllm"}
    host = options.vllm_server_host
    with suppress(ValueError):  # the host is a name
        # A server that listens on all addresses is on this machine.
        host = "127.0.0.1" if ip_address(host).is_unspecified else host
    url = options.vllm_server_base_url or [f"http://{host}:{options.vllm_server_port}"]
    return {"rollout_engine": "vllm_server", "vllm_server_base_url": url}
