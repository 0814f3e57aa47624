"""Fused LoRA layers: the adapter's product is added into the output of the base layer's product.
peft computes, scales and adds the adapter's product separately, in several passes over memory. In
cases that are not supported here, peft's original forward computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rloo.config.optional_packages import peft_library
from rloo.kernels import cpu_matmul
from rloo.kernels.bf16_rounding import in_float32, operands, rounded, rounded_matrix
from rloo.kernels.cpu_matmul import matrix_of
from rloo.kernels.fused_layers import asking


class _How(NamedTuple):
    """The factor of the adapter's product, and whether the operands of products are rounded."""

    scaling: float
    rounds: bool


class _LoRAProduct(torch.autograd.Function):
    """Computes rows @ weight.T + bias + scaling * rows @ down.T @ up.T, with shapes (T, K), (N, K),
    (N,), (r, K) and (N, r)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        how: _How,
    ) -> Tensor:
        given = weight, down, up
        if how.rounds:
            rows, weight, bias = operands(rows, weight, bias)
            down, up = rounded_matrix(down), rounded_matrix(up)
        inner = rows @ down.t()
        inner = (rounded(inner) if how.rounds else inner).mul_(how.scaling)
        ctx.save_for_backward(rows, *given, inner)
        ctx.how = how
        return cpu_matmul.forward(rows, weight, bias).addmm_(inner, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        scaling, rounds = ctx.how
        if rounds:
            grad = rounded(grad)
            weight, down, up = map(rounded_matrix, (weight, down, up))
        wanted = ctx.needs_input_grad
        of_rows = of_weight = of_bias = of_down = of_up = None
        if wanted[0] or wanted[3]:
            of_inner = (grad @ up).mul_(scaling)
            of_inner = rounded(of_inner) if rounds else of_inner
        if wanted[0]:
            of_rows = cpu_matmul.backward(grad, weight).addmm_(of_inner, down)
        if wanted[1]:
            of_weight = cpu_matmul.backward_to_weight(grad, rows, weight)
        if wanted[2]:
            of_bias = grad.sum(0)
        if wanted[3]:
            of_down = of_inner.t() @ rows
        if wanted[4]:
            of_up = grad.t() @ inner
        return of_rows, of_weight, of_bias, of_down, of_up, None


class _Linear(nn.Module):
    """A base class that precedes peft's Linear in the method resolution order."""

    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    lora_variant: Any
    scaling: dict[str, float]
    active_adapters: list[str]
    disable_adapters: bool
    merged: bool
    base_layer: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See peft's Linear."""
        if args or kwargs or (factors := self._factors()) is None or x.dtype != torch.float32:
            return super().forward(x, *args, **kwargs)
        scaling = self.scaling[self.active_adapters[0]]
        rows = x.reshape(-1, x.shape[-1])
        rounding = cpu_matmul.rounds()
        with in_float32(rounding):
            output = _LoRAProduct.apply(rows, *factors, _How(scaling, rounding))
        return output.view(*x.shape[:-1], -1)

    def _factors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor] | None:
        """Matrix and bias, and the adapter's two matrices. None if the layer computes more than
        these products."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        (name,) = self.active_adapters
        if name not in self.lora_A or name in self.lora_variant:
            return None
        dropout = self.lora_dropout[name]
        if self.training and not isinstance(dropout, nn.Identity):
            return None
        layers = (self.base_layer, self.lora_A[name], self.lora_B[name])
        own, down, up = (matrix_of(layer) for layer in layers)
        if own is None or down is None or up is None or down[1] is not None or up[1] is not None:
            return None
        return *own, down[0], up[0]


def install(model: nn.Module) -> None:
    """Make the layers in `model` that are exactly peft's Linear use the fused product."""
    plain: Any = peft_library().tuners.lora.layer.Linear
    ours = asking(plain, _Linear)
    for module in model.modules():
        if type(module) is plain:
            module.__class__ = ours
