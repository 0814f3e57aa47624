"""What a run sets of the machine: CPU threads, and what is kept of freed memory."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo.config.config import RLOOConfig
from rloo.run.preflight import check_threads

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, since a CPU update allocates and frees the same ones
    repeatedly, and the system clears every page that it gives out. Peak memory stays the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def let_segments_grow(device: torch.device) -> None:
    """Have torch's memory on a GPU grow in place, not in blocks of fixed size, between which
    micro-batches and caches of ever other sizes leave what no one can use. What the user has set in
    the environment stays. Must precede the first tensor there."""
    given = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if device.type == "cuda" and not given:
        # Not by the environment, which servers of vLLM would inherit: its pools cannot grow.
        name = "_accelerator_setAllocatorSettings"  # older ones have it under another name
        change: Any = getattr(torch._C, name, None) or torch.cuda.memory._set_allocator_settings
        change("expandable_segments:True")


def set_threads(model: PreTrainedModel, args: RLOOConfig) -> str:
    """Use `num_threads` CPU threads, or the number with which decoding is fastest in a short test:
    with small matrices a second one can cost more in waiting than it gains, especially if something
    else runs on the machine. Returns why there are as many."""
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
