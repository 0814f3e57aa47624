"""Values that are derived from the vLLM options, including TRL's options that select vLLM."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from rloo.config.options import TrainingOptions


def servers_dtype(options: TrainingOptions) -> str:
    """The dtype in which servers compute: `rollout_dtype`, or the trainer's dtype."""
    computed = "bfloat16" if options.bf16 else "float16" if options.fp16 else "float32"
    return options.rollout_dtype or computed


def tolerance_of(options: TrainingOptions) -> float:
    """The mean difference of log-probs at which a server's weights count as wrong, in nats."""
    in_float32 = servers_dtype(options) == "float32" and not (options.bf16 or options.fp16)
    return options.engine_options.tolerance or (1e-3 if in_float32 else 0.2)


def engine_of(options: TrainingOptions) -> dict[str, Any]:
    """`rollout_engine` and `vllm_server_base_url` from TRL's use_vllm, vllm_mode, vllm_server_host
    and vllm_server_port, unless they are set. Without use_vllm, the other three options have no
    effect, as in TRL."""
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
