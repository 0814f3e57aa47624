"""TRL's ways of asking for vLLM, and what follows from its options."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from rloo.config.options import TrainingOptions


def servers_dtype(options: TrainingOptions) -> str:
    """The precision in which servers compute: that asked for, or that of the trainer."""
    computed = "bfloat16" if options.bf16 else "float16" if options.fp16 else "float32"
    return options.rollout_dtype or computed


def tolerance_of(options: TrainingOptions) -> float:
    """The mean difference of log-probs at which a server's weights count as wrong, in nats."""
    in_float32 = servers_dtype(options) == "float32" and not (options.bf16 or options.fp16)
    return options.engine_options.tolerance or (1e-3 if in_float32 else 0.2)


def engine_of(options: TrainingOptions) -> dict[str, Any]:
    """`rollout_engine` and `vllm_server_base_url` as TRL's use_vllm, vllm_mode, vllm_server_host
    and vllm_server_port say them, where they are not given. Without use_vllm the others mean
    nothing, as in TRL."""
    if not options.use_vllm or options.rollout_engine != "auto":
        return {}
    if options.vllm_mode == "colocate":
        return {"rollout_engine": "vllm"}
    host = options.vllm_server_host
    with suppress(ValueError):  # a name
        # Where a server listens on all addresses, it is here.
        host = "127.0.0.1" if ip_address(host).is_unspecified else host
    url = options.vllm_server_base_url or [f"http://{host}:{options.vllm_server_port}"]
    return {"rollout_engine": "vllm_server", "vllm_server_base_url": url}
