"""The options of sampling with vLLM, and TRL's ways of asking for it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from ipaddress import ip_address
from typing import Any, Literal

from rloo.config.fields import OptionGroup
from rloo.config.tool_options import ToolOptions

# ruff: noqa: RUF009 - a subject's methods return dataclasses.field(...)

VLLM = OptionGroup("Sampling with vLLM")


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class VLLMOptions(ToolOptions):
    """All options, those of vLLM last."""

    # fmt: off
    use_vllm: bool = VLLM.from_trl(False,
        "Sample with vLLM: `rollout_engine` vllm or vllm_server, by `vllm_mode`.")
    vllm_mode: Literal["colocate", "server"] = VLLM.from_trl("colocate",
        "With `use_vllm`, start servers of vLLM (colocate) or use a running one (server).")
    vllm_server_host: str = VLLM.from_trl("0.0.0.0",
        "Host of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_port: int = VLLM.from_trl(8000,
        "Port of the running server, with `use_vllm` and `vllm_mode server`.")
    vllm_server_base_url: list[str] | None = VLLM.from_trl(None,
        "Addresses of running servers (http://host:port), with `rollout_engine vllm_server`.")
    vllm_server_timeout: float = VLLM.from_trl(240.0,
        "Seconds that a server of vLLM may take to start.")
    vllm_request_timeout: float = VLLM.rloo(1200.0,
        "Seconds that a server may take for one group of completions, or to load weights.")
    vllm_restarts: int = VLLM.rloo(3,
        "How often a run tries to have a server back that has failed.")
    vllm_devices: list[str] | None = VLLM.rloo(None,
        "GPUs of the servers that a run starts, by number; null takes the trainer's own.")
    vllm_tensor_parallel_size: int = VLLM.from_trl(1, "GPUs that compute one server's model.")
    vllm_gpu_memory_utilization: float = VLLM.from_trl(0.3,
        "Share of a GPU's memory that a server takes.")
    vllm_max_model_length: int | None = VLLM.from_trl(None,
        "Longest prompt and completion together on a server; null is what the model allows.")
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = VLLM.from_trl("vllm",
        "Whose code of the model a server runs.")
    vllm_enable_sleep_mode: bool | None = VLLM.from_trl(None,
        "Let servers give their memory back while training; null does so on the trainer's GPU.")
    vllm_serve_args: list[str] | None = VLLM.rloo(None,
        "Further arguments of `vllm serve`, as [--enforce-eager, --max-num-seqs, 64].")
    vllm_executable: list[str] = VLLM.rloo(["vllm"],
        "What starts vLLM: its program, or a path to that of another environment.")
    vllm_merge_adapter: bool | None = VLLM.rloo(None,
        "Give servers whole models, an adapter merged in; null: where they cannot apply it.")
    vllm_weight_transfer: Literal["auto", "files", "nccl"] = VLLM.rloo("auto",
        "How weights reach the servers: by the folder that they read (files), or over NCCL where "
        "trainer and server have GPUs of their own, and else by the folder (auto; nccl says why).")
    vllm_tolerance: float | None = VLLM.rloo(None,
        "Difference of log-probs at which a server's weights count as wrong; null: 0.001 in "
        "float32, else 0.2.")
    vllm_weights_dir: str | None = VLLM.rloo(None,
        "Folder for the weights that servers load, which they must see; null is shared memory for "
        "those that a run starts, else `output_dir`.")
    # fmt: on


# Every option. RLOOConfig's own fields are what others see of it
# (rloo.config.compat.parser_fields).
OPTIONS = fields(VLLMOptions)


def servers_dtype(options: VLLMOptions) -> str:
    """The precision in which servers compute: that asked for, or that of the trainer."""
    computed = "bfloat16" if options.bf16 else "float16" if options.fp16 else "float32"
    return options.rollout_dtype or computed


def tolerance_of(options: VLLMOptions) -> float:
    """The mean difference of log-probs at which a server's weights count as wrong, in nats."""
    in_float32 = servers_dtype(options) == "float32" and not (options.bf16 or options.fp16)
    return options.vllm_tolerance or (1e-3 if in_float32 else 0.2)


def engine_of(options: VLLMOptions) -> dict[str, Any]:
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
