"""Uses of torch's private API, or of API that differs between supported versions. Each use has a
fallback. An operation is None if torch does not have it. The callers of an operation test its
results at the start of a run. `rloo.distributed.group_setup` also uses private API, of
torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _operation(library: str, name: str) -> Any:
    return getattr(getattr(torch.ops, library), name, None)


# Attention over segments on a GPU: tested by `flash_gpu.has_segments`. Fallback: padded rows.
flash_forward: Any = _operation("aten", "_flash_attention_forward")
flash_backward: Any = _operation("aten", "_flash_attention_backward")
# Attention with a mask: tested by `flash_gpu.has_dense`. Fallback: attention by its definition.
efficient_attention: Any = _operation("aten", "_scaled_dot_product_efficient_attention")
# Attention on a CPU: tested by `prepare_model.check_forward`. Fallback: padded rows.
cpu_flash: Any = _operation("aten", "_scaled_dot_product_flash_attention_for_cpu")
cpu_flash_backward: Any = _operation("aten", "_scaled_dot_product_flash_attention_for_cpu_backward")
# Products by oneDNN: tested by `cpu_matmul.unavailable_reason`. Fallback: MKL.
pack_matrix: Any = _operation("mkldnn", "_reorder_linear_weight")
multiply_packed: Any = _operation("mkldnn", "_linear_pointwise")


def has_cpu_flash() -> bool:
    """Whether torch has CPU attention that returns the log-sum-exp of the scores."""
    return cpu_flash is not None and cpu_flash_backward is not None


def uses_tf32(device: torch.device) -> bool:
    """Whether this device rounds the operands of float32 products to 10 bits. Reads torch's setting
    `fp32_precision`. The older setting `allow_tf32` also changes it, but does not show a value that
    was set through `fp32_precision`."""
    setting = torch.backends.cuda.matmul.fp32_precision
    return device.type == "cuda" and setting not in ("ieee", "none")


def let_segments_grow() -> bool:
    """Make torch's GPU memory segments expandable. Call this function before the first tensor is on
    the GPU. Returns False if torch cannot do this."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:
        change("expandable_segments:True")
    return change is not None


def mark_varying(tensor: Tensor, *dimensions: int) -> None:
    """Mark the sizes of these dimensions as dynamic for torch.compile. Otherwise torch.compile
    compiles a second time when a size first changes."""
    mark = getattr(torch._dynamo, "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dimensions)


def is_profiled() -> bool:
    """Whether torch's profiler is running; False if torch does not report this."""
    return bool(getattr(torch.autograd, "_profiler_enabled", lambda: False)())


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each tensor, or NaN if the tensor has a NaN."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [tensor.abs().amax() for tensor in tensors]
    return list(together(list(tensors), torch.inf))


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by `factor` in place."""
    together = getattr(torch, "_foreach_mul_", None)
    if together is not None:
        together(list(tensors), factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)
