"""Layers with a LoRA adapter, as peft has them: its product is added where the layer's own has
just been written. peft computes it apart, scales it and adds it, in several passes over memory. For
all else that its layers can do, their own forward computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rloo.model import products
from rloo.model.layers import asking
from rloo.model.merging import peft_library
from rloo.model.products import matrix_of


class _Product(torch.autograd.Function):
    """rows @ weight.T + bias + scaling * rows @ down.T @ up.T, of (T, K), (N, K), (N,), (r, K) and
    (N, r)."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        inner = (rows @ down.t()).mul_(scaling)
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scaling = scaling
        return products.forward(rows, weight, bias).addmm_(inner, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_rows = of_weight = of_bias = of_down = of_up = None
        if wanted[0] or wanted[3]:
            of_inner = (grad @ up).mul_(ctx.scaling)
        if wanted[0]:
            of_rows = products.backward(grad, weight).addmm_(of_inner, down)
        if wanted[1]:
            of_weight = products.backward_to_weight(grad, rows, weight)
        if wanted[2]:
            of_bias = grad.sum(0)
        if wanted[3]:
            of_down = of_inner.t() @ rows
        if wanted[4]:
            of_up = grad.t() @ inner
        return of_rows, of_weight, of_bias, of_down, of_up, None


class _Linear(nn.Module):
    """Before peft's Linear."""

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
        """See peft."""
        if args or kwargs or (factors := self._factors()) is None or x.dtype != torch.float32:
            return super().forward(x, *args, **kwargs)
        rows = x.reshape(-1, x.shape[-1])
        output = _Product.apply(rows, *factors)
        return output.view(*x.shape[:-1], -1)

    def _factors(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, float] | None:
        """Matrix and bias, the adapter's two matrices, and its factor; None where it is more than
        these that is to be computed."""
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
        return *own, down[0], up[0], self.scaling[name]


def install(model: nn.Module) -> None:
    """Have the layers of `model` that peft has adapted, and that are its plain kind, ask here."""
    plain: Any = peft_library().tuners.lora.layer.Linear
    ours = asking(plain, _Linear)
    for module in model.modules():
        if type(module) is plain:
            module.__class__ = ours
