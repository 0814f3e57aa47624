"""Measure the peak rates of a CUDA device, with which other figures are compared:

    python -m benchmarks.gpu_ceilings

The last line is JSON: bytes per second of a large copy (read and written), and operations per
second of a product of two 8,192 x 8,192 matrices in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median

import torch

_SIDE, _BYTES, _REPEATS = 8192, 1 << 31, 20


def seconds_of(work: Callable[[], object]) -> float:
    """The median seconds of some repeats, measured with events of the device."""
    found = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found)


def main() -> None:
    """Measure the rates and print them."""
    source = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * _BYTES / seconds_of(lambda: target.copy_(source))
    left, right = torch.randn(2, _SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    multiplied = 2 * _SIDE**3 / seconds_of(lambda: left @ right)
    facts = {
        "card": torch.cuda.get_device_name(),
        "copy_tb_s": round(copied / 1e12, 3),
        "bf16_tflop_s": round(multiplied / 1e12, 1),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
