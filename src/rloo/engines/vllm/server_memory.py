"""Checks before a server starts that the KV cache of one completion of maximum length fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rloo.config.file_checks import largest_of_layers
from rloo.distributed.standard_streams import say
from rloo.engines.vllm.server_process import ServerConfig
from rloo.model.attention import head_size, num_kv_heads
from rloo.model.token_budget import gigabytes

# Arguments of vLLM that change the memory of weights or KV cache. With any of them nothing is
# checked here.
_OTHER_MEMORY = (
    "--gpu-memory-utilization", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--quantization",
    "-q", "--cpu-offload-gb", "--num-gpu-blocks-override", "--pipeline-parallel-size", "-pp",
    "--tensor-parallel-size", "-tp", "--decode-context-parallel-size", "-dcp",
)  # fmt: skip
_FULL = ("full_attention", "attention", "hybrid")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


def require_room(
    serving: ServerConfig, config: Any, parameters: int, memory: int | None, needed: int
) -> None:
    """Raise ValueError if the KV cache of `needed` tokens does not fit into a server's share of the
    `memory` of each GPU, in bytes, beside the weights of a model with this configuration and number
    of `parameters`. Activations are not counted, so a server that passes may still be too small.
    Without `memory` (on a CPU) nothing is checked."""
    share, parallel = serving.gpu_memory_utilization, serving.tensor_parallel_size
    names = {argument.partition("=")[0].replace("_", "-") for argument in serving.arguments}
    if memory is None or share is None or names & {*_OTHER_MEMORY}:
        return
    size = getattr(torch, serving.dtype).itemsize
    weights = parameters * size / parallel
    left = max(0.0, share * memory - weights)
    cache = kv_cache_bytes(config, needed, size, parallel)
    if cache > left:
        raise ValueError(
            f"a server reserves {share:g} of a GPU's {gigabytes(memory)}; the weights take "
            f"{gigabytes(weights)}, and the KV cache of one completion of full length, {needed:,} "
            f"tokens with its prompt, needs {gigabytes(cache)}, which must fit into the remaining "
            f"{gigabytes(left)} "
            "(vllm_gpu_memory_utilization, vllm_tensor_parallel_size, max_prompt_length, "
            "max_completion_length)"
        )


def kv_cache_bytes(config: Any, tokens: int, size: int, parallel: int = 1) -> int:
    """Bytes on each of `parallel` GPUs of the keys and values of one sequence of `tokens` tokens
    with `size` bytes per number. Layers with a window count at most the window. Recurrent layers
    and layers that share the cache of another layer count 0, and so does a model whose layers have
    different heads."""
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    heads = largest_of_layers(config, "num_attention_heads")
    if getattr(config, "per_layer_attributes", None) or (kinds is None and not heads):
        return 0
    latent = getattr(config, "kv_lora_rank", None)
    if latent:  # multi-head latent attention: every GPU has the latent vector of all heads
        numbers = latent + config.qk_rope_head_dim
    else:
        numbers = 2 * max(1, num_kv_heads(config) // parallel) * head_size(config)
    if kinds is None:
        kinds = ["sliding_attention"] * config.num_hidden_layers
    cached = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return size * numbers * sum(_cached_tokens(config, kind, tokens) for kind in kinds[:cached])


def _cached_tokens(config: Any, kind: str, tokens: int) -> int:
    """The number of tokens in the cache of a layer after `tokens` tokens."""
    if kind in _FULL:
        return tokens
    window = getattr(config, _WINDOWS[kind], None) or tokens if kind in _WINDOWS else 0
    return min(tokens, window)


def num_parameters(config: Any, *, trust_remote_code: bool = False) -> int | None:
    """See `count_parameters`. 0 if the parameters are quantised. If they cannot be counted, print a
    note, and return None."""
    if getattr(config.get_text_config(), "quantization_config", None) is not None:
        return 0
    try:
        return count_parameters(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # model code may fail in any way
        say(
            "not checked: whether a server's GPUs have room for the KV cache of one completion, "
            "since the model's parameters cannot be counted without its weights: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        return None


def count_parameters(config: Any, *, trust_remote_code: bool = False) -> int:
    """The number of parameters of a language model with this configuration, counted on a module
    without weights. Raises any error of the model's code."""
    config = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def visible_gpus() -> list[int]:
    """The memory in bytes of each GPU that this process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(number).total_memory for number in range(count)]


def smallest_gpu(gpus: Sequence[int], parallel: int, devices: str | None = None) -> int | None:
    """The memory in bytes of the smallest GPU of a server with `parallel` GPUs. `gpus` are the
    sizes of the GPUs that this process sees. `devices` is the server's CUDA_VISIBLE_DEVICES (None:
    that of this process). None without GPUs, and if this process does not see a device."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [*map(str, range(len(gpus)))] if seen is None else seen.split(",")
    sizes = dict(zip([name.strip() for name in names], gpus, strict=False))
    wanted = [*sizes][:parallel] if devices is None else [d.strip() for d in devices.split(",")]
    if not wanted or not {*wanted} <= sizes.keys():
        return None
    return min(sizes[device] for device in wanted)
