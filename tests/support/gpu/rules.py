"""What torch refuses on a GPU under `use_deterministic_algorithms`, by its sources of 2.8 to 2026:
`alertNotDeterministic` in aten/src/ATen/native/cuda, and `alertCuBLASConfigNotDeterministic` in
aten/src/ATen/Context.cpp. Cumulative sums are no more among them since 2.6."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# IndexKernel.cu and Indexing.cu, Sorting.cpp, SummaryOps.cu: whatever they are given.
_ALWAYS = {"index_reduce", "put", "kthvalue", "median.dim", "nanmedian.dim", "histc"}
# cuBLAS reads its setting once.
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv"}
_SETTINGS = (":4096:8", ":16:8")


def is_not_deterministic(name: str, func: Any, args: Sequence[Any]) -> bool:
    """Whether a GPU has no deterministic way to compute this."""
    bare = name.removeprefix("aten::").rstrip("_")
    if bare in _PRODUCTS:
        return os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _SETTINGS
    if bare == "scatter_reduce":  # ScatterGatherKernel.cu
        return "prod" in args
    if bare == "bincount":
        return len(args) > 1 and isinstance(args[1], Tensor)
    return bare in _ALWAYS or f"{bare}.{func._overloadname}" in _ALWAYS


def alerts() -> bool:
    """Whether that is an error now."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
