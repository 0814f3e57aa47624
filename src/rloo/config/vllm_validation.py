"""Checks of the vLLM options: unsupported sampling, and contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rloo.config.engine_spec import engine_spec
from rloo.config.options import TrainingOptions
from rloo.config.vllm_options import longest_completion, longest_sequence, shares_ranks_gpus
from rloo.distributed import process_count

# The range of temperatures that vLLM does not change.
COLDEST, HOTTEST = 0.01, 2.0
# Options that filter the policy's distribution -> the values at which they do not.
_FILTERS = {
    "top_p": (1.0,), "top_k": (0,), "min_p": (None, 0.0), "repetition_penalty": (1.0,),
    "eval_kwargs.top_p": (None, 1.0), "eval_kwargs.top_k": (None, 0),
}  # fmt: skip


def check_vllm(config: TrainingOptions) -> None:
    """Raise ValueError for vLLM options if the rollout engine is another one."""
    if engine_spec(config.rollout_engine).options == "vllm":
        return
    for fault in _in_vain(config):
        raise ValueError(fault)
    if config.use_vllm:
        raise ValueError(
            f"use_vllm is true and rollout_engine is {config.rollout_engine}; both say what "
            "samples, so give only one (use_vllm, rollout_engine)"
        )


def check_in_use(config: TrainingOptions) -> None:
    """Raise ValueError for the first fault in the options of `config`, whose engine is vLLM."""
    for fault in _in_use(config):
        raise ValueError(fault)


def _in_vain(config: TrainingOptions) -> Iterator[str]:
    """Faults for keys of `engine_kwargs` that need vLLM. TRL's vLLM options are allowed: without
    use_vllm they have no effect, and scripts may set them."""
    for name, value in (config.engine_kwargs or {}).items():
        if name not in ("copy_weights", "executable"):
            yield (
                f"engine_kwargs.{name} is {value} and rollout_engine is "
                f"{config.rollout_engine}; it is about vLLM (rollout_engine vllm or vllm_server)"
            )


def _in_use(config: TrainingOptions) -> Iterator[str]:
    engine, given = config.rollout_engine, config.vllm_server_base_url
    devices, copies = config.engine_options.devices, config.engine_options.copy_weights
    if engine == "vllm_server" and not given:
        yield (
            "rollout_engine is vllm_server and vllm_server_base_url is null; say where the server "
            "is (vllm_server_base_url http://host:port), or have one started (rollout_engine vllm)"
        )
    if engine == "vllm" and given:
        yield (
            f"rollout_engine is vllm, which starts servers, and vllm_server_base_url is {given}; "
            "to use that one set rollout_engine vllm_server"
        )
    if engine == "vllm_server" and devices is not None:
        yield (
            f"engine_kwargs.devices is {devices} and rollout_engine is vllm_server; a given "
            "server has its devices (engine_kwargs.devices, or rollout_engine vllm)"
        )
    if devices == []:
        yield "engine_kwargs.devices is empty; null takes the trainer's own GPU"
    for url in given or []:
        if not url.startswith(("http://", "https://")):
            yield f"vllm_server_base_url is {url}; an address begins with http:// or https://"
    for name, allowed in _FILTERS.items():
        value = _value(config, name)
        if value not in allowed:
            yield (
                f"{name} is {value} and rollout_engine is {engine}; vLLM returns "
                "the log-prob of what it samples from, and the policy's would be unknown "
                f"({name}, or rollout_engine native)"
            )
    for name in ("temperature", "eval_kwargs.temperature"):
        value = _value(config, name)
        if value is not None and not COLDEST <= value <= HOTTEST:
            yield f"{name} is {value:g}; vLLM samples from {COLDEST:g} to {HOTTEST:g} ({name})"
    if copies is not None:
        yield (
            f"engine_kwargs.copy_weights is {copies} and rollout_engine is {engine}; it is about "
            "the native engine"
        )
    if config.vllm_enable_sleep_mode and config.max_staleness:
        yield (
            f"vllm_enable_sleep_mode is true and max_staleness is {config.max_staleness}; a server "
            "that samples beside training has no time to sleep (vllm_enable_sleep_mode, "
            "max_staleness)"
        )
    size = config.vllm_tensor_parallel_size
    if devices is not None and len(devices) % size:
        yield (
            f"engine_kwargs.devices are {len(devices)} and vllm_tensor_parallel_size is {size}; "
            "every server takes as many (engine_kwargs.devices)"
        )
    ranks = config.num_processes or process_count()
    if shares_ranks_gpus(config) and ranks > 1 and ranks % size:
        yield undivided(ranks, size)
    yield from _lengths(config)


def undivided(ranks: int, size: int, options: str = "num_processes") -> str:
    """The fault of a number of ranks that is no multiple of a server's `size` in GPUs. `options`
    are those that set the number."""
    return (
        f"vllm_tensor_parallel_size is {size} and {ranks} processes train; each server takes the "
        f"GPUs of {size} of them, so their number must be a multiple (vllm_tensor_parallel_size, "
        f"{options}; or engine_kwargs.devices)"
    )


def _lengths(config: TrainingOptions) -> Iterator[str]:
    """Faults of a server's context length."""
    limit, longest = config.vllm_max_model_length, config.max_completion_length
    if limit is not None and limit <= longest:
        yield (
            f"vllm_max_model_length is {limit} and max_completion_length {longest}; at least 1 "
            "token must be left for the prompt (vllm_max_model_length)"
        )
    elif limit is not None and limit < longest_sequence(config):
        yield (
            f"vllm_max_model_length is {limit}, and the longest prompt and completion have "
            f"{config.max_prompt_length or 1} + {longest_completion(config)} tokens; a server must "
            "hold one completion of full length (vllm_max_model_length, max_prompt_length, "
            "max_completion_length)"
        )


def _value(config: TrainingOptions, name: str) -> float | None:
    """The value of an option, or of a mapping's key (`option.key`)."""
    option, dot, key = name.partition(".")
    value: Any = getattr(config, option)
    return (value or {}).get(key) if dot else value
