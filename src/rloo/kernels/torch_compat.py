"""What is used of torch that is not public, or differs between the versions that are supported, in
one place: each with the way that is taken where a version does not have it. Operations are None
where there is none; that they compute what is expected is tried where a run begins, by those who
call them. Of torch.distributed there is one more, in `rloo.distributed.group_setup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _operation(library: str, name: str) -> Any:
    return getattr(getattr(torch.ops, library), name, None)


# Attention over segments on a GPU: tried by `gpu_attention.has_segments`; without it, in rows.
flash_forward = _operation("aten", "_flash_attention_forward")
flash_backward = _operation("aten", "_flash_attention_backward")
# With a mask: tried by `gpu_attention.has_dense`; without it, by its definition.
efficient_attention = _operation("aten", "_scaled_dot_product_efficient_attention")
# On a CPU: compared with the model's own by `preparation.check_forward`; without it, in rows.
cpu_flash = _operation("aten", "_scaled_dot_product_flash_attention_for_cpu")
cpu_flash_backward = _operation("aten", "_scaled_dot_product_flash_attention_for_cpu_backward")
# Products of oneDNN: tried by `cpu_matmul.unavailable_reason`; without them, MKL computes.
pack_matrix = _operation("mkldnn", "_reorder_linear_weight")
multiply_packed = _operation("mkldnn", "_linear_pointwise")


def has_cpu_flash() -> bool:
    """Whether attention on a CPU returns its normalizers."""
    return cpu_flash is not None and cpu_flash_backward is not None


def uses_tf32(device: torch.device) -> bool:
    """Whether this device rounds the operands of float32 products to 10 bits. The older setting
    (`allow_tf32`) sets this one, and is not told any more once this one was set."""
    setting = torch.backends.cuda.matmul.fp32_precision
    return device.type == "cuda" and setting not in ("ieee", "none")


def let_segments_grow() -> bool:
    """Have memory of a GPU grow in place, from the first tensor on; False where that cannot be."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        change("expandable_segments:True")
    return change is not None


def mark_varying(tensor: Tensor, *dimensions: int) -> None:
    """Have torch.compile take these sizes for such that vary, where it is not told so by a second
    compilation."""
    mark = getattr(torch._dynamo, "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dimensions)


def is_profiled() -> bool:
    """Whether a profile is being made; False where torch does not say."""
    return bool(getattr(torch.autograd, "_profiler_enabled", lambda: False)())


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, NaN where there is one."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [tensor.abs().amax() for tensor in tensors]
    return list(together(list(tensors), torch.inf))


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each in place."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)
