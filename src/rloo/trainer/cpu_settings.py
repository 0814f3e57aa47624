"""Settings of the process: CPU threads, CPU libraries and kernels, compilation, and memory
allocators."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo import kernels
from rloo.config.config import RLOOConfig
from rloo.config.vllm_options import servers_dtype
from rloo.kernels import cpu_matmul, gpu_kernels, torch_compat
from rloo.kernels.bf16_rounding import reduced_precision
from rloo.model.attention import head_size
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.trainer.preflight import check_threads

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# With fewer parameters the measurement takes more time than a faster library saves in a run.
_WORTH_MEASURING = 2**20


def keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks. A CPU update repeatedly allocates and frees blocks of
    the same sizes, and the operating system zeroes every new page. Peak memory does not change."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def let_segments_grow(device: torch.device) -> None:
    """Turn on torch's expandable segments on a GPU, against fragmentation by micro-batches and
    caches of varying sizes. A user's setting in the environment has priority. Call this function
    before the first tensor is on the GPU."""
    given = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if device.type == "cuda" and not given:
        # Not by an environment variable: vLLM servers would inherit it, and their memory pools do
        # not support expandable segments.
        torch_compat.let_segments_grow()


def set_threads(model: PreTrainedModel, args: RLOOConfig) -> str:
    """Use `num_threads` CPU threads. The default is one thread or all threads, whichever is faster
    in a short test: with small matrices, several threads can be slower than one, especially on a
    busy machine. Returns the reason for the number."""
    if args.num_threads is not None:
        check_threads(args.num_threads)
        torch.set_num_threads(args.num_threads)
        return "num_threads"
    available = torch.get_num_threads()
    if available == 1 or model.device.type != "cpu":
        return "all that torch may use"
    tokens = torch.zeros(64, 4, dtype=torch.long)
    seconds = {}
    for threads in (1, available):
        torch.set_num_threads(threads)
        with torch.no_grad():
            model(tokens, use_cache=False)
            start = time.perf_counter()
            for _ in range(3):
                model(tokens, use_cache=False)
        seconds[threads] = time.perf_counter() - start
    chosen, other = sorted(seconds, key=seconds.__getitem__)
    torch.set_num_threads(chosen)
    saved = 100 * (1 - seconds[chosen] / seconds[other])
    return f"decoding took {saved:.0f} % less time than with {other} in a short test; num_threads"


def _settle_products(policy: Policy, args: RLOOConfig) -> None:
    """Use oneDNN for the matrix products in `onednn`. By default a measurement in the main process
    selects the products that oneDNN computes faster. If oneDNN is missing in a process, or has
    different results there, MKL computes all products, and a note is added."""
    chosen = args.cpu_options.onednn
    if chosen is None and count_parameters(policy.model) < _WORTH_MEASURING:
        chosen = []
    fault = cpu_matmul.unavailable_reason() if chosen != [] else None
    if policy.world.any_rank(fault is not None):
        here = fault or "another process cannot use it"
        policy.notes.append(f"MKL computes all products, not oneDNN: {here} (cpu_kwargs.onednn)")
        chosen = []
    if chosen is None:
        chosen = policy.world.broadcast_object(
            cpu_matmul.choose(bf16=args.bf16) if policy.world.is_main else []
        )
    cpu_matmul.use(chosen)


def _settle_compiled(policy: Policy, args: RLOOConfig) -> None:
    """Use compiled functions if `torch_compile` is set; add a note if compilation is impossible."""
    gpu_kernels.use(False)
    if args.torch_compile:
        here = _compile_unavailable_reason(policy, args)
        reason = next(filter(None, policy.world.all_gather_object(here)), None)
        if reason is not None:
            policy.notes.append(f"nothing is compiled: {reason} (torch_compile)")
        gpu_kernels.use(reason is None)


def _compile_unavailable_reason(policy: Policy, args: RLOOConfig) -> str | None:
    if policy.device.type != "cuda":
        return "the model is not on a GPU"
    config = policy.model.config.get_text_config()
    dtype = reduced_precision(args) or torch.float32
    return gpu_kernels.unavailable_reason(
        policy.device, dtype, config.hidden_size, head_size(config)
    )


def set_arithmetic(policy: Policy, args: RLOOConfig) -> None:
    """Choose the matrix library and whether the C kernels are used (`cpu_kwargs`). All processes
    make the same choice. If the C kernels are unavailable on a CPU, a note has the reason. Raises
    ValueError if the options require the C kernels and a process cannot use them."""
    on_cpu, reason = policy.device.type == "cpu", None
    if on_cpu:
        _settle_products(policy, args)
    asked = args.cpu_options.kernels
    if asked is not False:
        here = kernels.unavailable_reason() if on_cpu else "the model is not on a CPU"
        reason = next(filter(None, policy.world.all_gather_object(here)), None)
        if reason and asked:
            raise ValueError(f"cpu_kwargs.kernels is true, but {reason}; leave it out")
        if reason and on_cpu:
            policy.notes.append(
                f"torch computes without kernels in C: {reason} (cpu_kwargs.kernels)"
            )
    kernels.use(asked is not False and reason is None)
    _settle_compiled(policy, args)
    by_torch = on_cpu and not kernels.in_use() and servers_dtype(args) == "bfloat16"
    packs = any(name.startswith("packed") for name in cpu_matmul.in_use())
    if by_torch and packs and not cpu_matmul.can_pack(torch.bfloat16):
        policy.notes.append(
            "oneDNN packs no matrices in bfloat16 on this processor: the sampler multiplies by "
            "them as they are (cpu_kwargs.onednn, rollout_dtype)"
        )


def arithmetic() -> dict[str, Any]:
    """The current values of the options that choose threads, libraries and kernels."""
    return {
        "num_threads": torch.get_num_threads(),
        "cpu_kwargs": {"kernels": kernels.in_use(), "onednn": cpu_matmul.in_use()},
    }


def resume_arithmetic(config: RLOOConfig, before: Mapping[str, Any]) -> list[str]:
    """Restore the threads, libraries and kernels of an earlier session (`before`), unless the
    options set them. Returns the settings that differ from the earlier session."""
    earlier = {"onednn": [], "kernels": False, **(before.get("cpu_kwargs") or {})}  # may lack keys
    if config.num_threads is None:
        torch.set_num_threads(before["num_threads"])
    if config.cpu_options.onednn is None:
        cpu_matmul.use(earlier["onednn"])
    if config.cpu_options.kernels is None and not earlier["kernels"]:
        kernels.use(False)
    now = arithmetic()["cpu_kwargs"]
    return [f"cpu_kwargs.{n} {earlier[n]} -> {now[n]}" for n in now if now[n] != earlier[n]]
