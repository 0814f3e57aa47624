"""What the machine can do, measured in the same run: matrix rate and memory bandwidth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MATRIX = 2048
GPU_MATRIX = 8192
_REPEATS = 12


def measure_machine(threads: int, *, cuda: bool = False) -> dict[str, Any]:
    """Facts for the report. Rates are the best of several repeats, in operations and bytes a
    second; the matrix rate is that of the best thread count."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if cuda:
        facts["gpu"] = torch.cuda.get_device_name()
        return facts | measure_rates("cuda", torch.bfloat16, GPU_MATRIX)
    before = torch.get_num_threads()
    rates = {}
    for count in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(count)
        rates[count] = measure_rates("cpu", torch.float32, MATRIX)
    torch.set_num_threads(before)
    best = max(rates, key=lambda count: rates[count]["matrix_rate"])
    bandwidth = max(rate["bandwidth"] for rate in rates.values())
    return facts | rates[best] | {"matrix_threads": best, "bandwidth": bandwidth}


def faster(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Of two measurements of a machine the larger rates: what disturbs them only lowers them."""
    best = max(one, other, key=lambda facts: facts["matrix_rate"])
    return best | {"bandwidth": max(one["bandwidth"], other["bandwidth"])}


def measure_rates(device: str, dtype: torch.dtype, size: int) -> dict[str, float]:
    """Operations a second of a square matrix product, and bytes a second of reading memory (on a
    GPU of copying it, read and written counted)."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    product = _best_seconds(lambda: torch.mm(a, b, out=out), device)
    large = torch.ones(1 << 28, dtype=torch.uint8, device=device).view(torch.float32)
    if device == "cuda":
        copy = torch.empty_like(large)
        bandwidth = 2 * large.nbytes / _best_seconds(lambda: copy.copy_(large), device)
    else:
        bandwidth = large.nbytes / _best_seconds(large.sum, device)
    return {"matrix_rate": 2 * size**3 / product, "bandwidth": bandwidth}


def _best_seconds(work: Callable[[], Any], device: str) -> float:
    times = []
    for _ in range(_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
