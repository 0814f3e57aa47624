"""What a run sets of the machine: CPU threads, the library of products, and what is kept of freed
memory."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from transformers import PreTrainedModel

from rloo.config.config import RLOOConfig
from rloo.model import products
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters
from rloo.run.preflight import check_threads

# Parameters of glibc's mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# With fewer parameters a run is over before a faster library has repaid its measurement.
_WORTH_MEASURING = 2**20


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, since a CPU update allocates and frees the same ones
    repeatedly, and the system clears every page that it gives out. Peak memory stays the same."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


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


def settle_products(policy: Policy, args: RLOOConfig) -> None:
    """Have oneDNN compute what `onednn` says, or what a measurement in the main process finds it
    faster at. Where some process has no oneDNN, or one that computes other numbers, MKL does all,
    with a note."""
    chosen = args.onednn
    if chosen is None and count_parameters(policy.model) < _WORTH_MEASURING:
        chosen = []
    fault = products.fault() if chosen != [] else None
    if policy.world.any(fault is not None):
        here = fault or "another process cannot use it"
        policy.notes.append(f"MKL computes all products, not oneDNN: {here} (onednn)")
        chosen = []
    if chosen is None:
        chosen = policy.world.from_main(products.choose() if policy.world.is_main else [])
    products.use(chosen)
