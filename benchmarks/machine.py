"""The rates of the machine, measured in the same run: matrix rate and memory bandwidth."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.processor import describe_processor
from rloo.kernels.cpu_matmul import multiply, pack

MATRIX = 2048
GPU_MATRIX = 8192
_REPEATS = 12


def measure_machine(threads: int, *, cuda: bool = False) -> dict[str, Any]:
    """Facts about the machine for the report. Rates are the best of several repeats, in operations
    and bytes per second. The matrix rate is for the best thread count and library, which the facts
    name. `library_rates` has the best rate of each library."""
    facts: dict[str, Any] = {
        "cpu": describe_processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if cuda:
        facts["gpu"] = torch.cuda.get_device_name()
        return facts | measure_rates("cuda", torch.bfloat16, GPU_MATRIX)
    before = torch.get_num_threads()
    rates = []
    for count in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(count)
        rates.append(measure_rates("cpu", torch.float32, MATRIX) | {"matrix_threads": count})
    torch.set_num_threads(before)
    bandwidth = max(rate["bandwidth"] for rate in rates)
    return facts | max(rates, key=lambda rate: rate["matrix_rate"]) | {"bandwidth": bandwidth}


def faster(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The larger rates of two measurements of a machine, since disturbances only lower the
    rates."""
    best = max(one, other, key=lambda facts: facts["matrix_rate"])
    rates = [facts.get("library_rates", {}) for facts in (one, other)]
    return best | {
        "bandwidth": max(one["bandwidth"], other["bandwidth"]),
        "library_rates": {
            name: max(rate[name] for rate in rates if name in rate)
            for name in {**rates[0], **rates[1]}
        },
    }


def measure_rates(device: str, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """Operations per second of a square matrix product by the fastest library; the library's name;
    bytes per second of reading memory (on a GPU of a copy, with reads and writes counted)."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    rates = {
        library: 2 * size**3 / _best_seconds(work, device)
        for library, work in _products(a, b).items()
    }
    library = max(rates, key=lambda name: rates[name])
    large = torch.ones(1 << 28, dtype=torch.uint8, device=device).view(torch.float32)
    if device == "cuda":
        copy = torch.empty_like(large)
        bandwidth = 2 * large.nbytes / _best_seconds(lambda: copy.copy_(large), device)
    else:
        bandwidth = large.nbytes / _best_seconds(large.sum, device)
    return {
        "matrix_rate": rates[library],
        "library": library,
        "library_rates": rates,
        "bandwidth": bandwidth,
    }


def _products(a: Tensor, b: Tensor) -> dict[str, Callable[[], Any]]:
    """By library, a function that multiplies two square matrices. Some CPU builds of torch have
    oneDNN in addition to the default library."""
    out = torch.empty_like(a)
    if a.device.type != "cpu":
        return {"torch": lambda: torch.mm(a, b, out=out)}
    own = "MKL" if torch.backends.mkl.is_available() else "torch's own"
    found: dict[str, Callable[[], Any]] = {own: lambda: torch.mm(a, b, out=out)}
    try:
        packed = pack(b)
        multiply(a, packed)
    except (AttributeError, NotImplementedError, RuntimeError):  # a torch without oneDNN
        return found
    # oneDNN's reordering of an unpacked matrix is not counted as part of a product.
    return found | {"oneDNN": lambda: multiply(a, packed)}


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
