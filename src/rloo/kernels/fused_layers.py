"""Fused norms, gated units and rotary embeddings of known architectures. On float32 CPU tensors the
C kernels compute them, if these kernels are in use (`rloo.kernels`). On a GPU, compiled functions
compute them (`gpu_kernels`). In all other cases the module's original forward computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rloo import kernels
from rloo.kernels import gpu_kernels, ops

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PLAIN = (Tensor, nn.Parameter)
# The argument name of the cache in a forward pass, since transformers 5.24 and in older versions.
CACHES = ("cache", "past_key_values")


def computes(*tensors: Tensor) -> bool:
    """Whether to use the C kernels for these tensors. Torch computes for subclasses of Tensor
    (sharded tensors, or tensors without memory)."""
    return (
        kernels.in_use()
        and all(
            type(x) in _PLAIN and x.dtype == torch.float32 and x.device.type == "cpu"
            for x in tensors
        )
        and not torch.compiler.is_compiling()
    )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y, inverse = ops.rms_norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *ops.rms_norm_backward(grad.contiguous(), *ctx.saved_tensors), None


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return ops.gated_unit(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return ops.gated_unit_backward(grad.contiguous(), *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    """Rotates heads (B, T, H, D). If there is a weight, they are normalized first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, cosine: Tensor, sine: Tensor, epsilon: float
    ) -> Tensor:
        cosine, sine, x = cosine.contiguous(), sine.contiguous(), x.contiguous()
        y, inverse = ops.rotary(x, weight, cosine, sine, epsilon)
        kept = x if weight is not None else None  # a rotation's gradient needs no x
        ctx.save_for_backward(kept, weight, cosine, sine, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ops.rotary_backward(grad.contiguous(), *ctx.saved_tensors), None, None, None


class _Kernels(NamedTuple):
    norm: Callable[..., Tensor]
    gated_unit: Callable[..., Tensor]
    rotary: Callable[..., Tensor]


_IN_C = _Kernels(_Norm.apply, _GatedUnit.apply, _Rotary.apply)
_COMPILED = _Kernels(gpu_kernels.rms_norm, gpu_kernels.gated_unit, gpu_kernels.rotary)


def _kernels_for(*tensors: Tensor | None) -> _Kernels | None:
    given = [x for x in tensors if x is not None]
    if computes(*given):
        return _IN_C
    return _COMPILED if gpu_kernels.computes(*given) else None


class _RMSNorm(nn.Module):
    """A base class that precedes transformers' RMSNorm classes in the method resolution order."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        own = _kernels_for(hidden_states, self.weight)
        if own is None:
            theirs: Tensor = super().forward(hidden_states)
            return theirs
        return own.norm(hidden_states, self.weight, self.variance_epsilon)


class _MLP(nn.Module):
    """A base class that precedes transformers' gated MLP classes in the method resolution order."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Any:
        if _kernels_for(x) is None:
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        own = _kernels_for(gate, up)
        return self.down_proj(self.act_fn(gate) * up if own is None else own.gated_unit(gate, up))


class _Attention(nn.Module):
    """A base class that precedes transformers' attention classes in the method resolution order,
    for forwards without a cache."""

    config: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    head_dim: int
    scaling: float
    attention_dropout: float

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        implementation = self.config._attn_implementation
        if (
            any(kwargs.get(name) is not None for name in CACHES)
            or position_embeddings is None
            or implementation not in ALL_ATTENTION_FUNCTIONS
            or _kernels_for(hidden_states, *position_embeddings) is None
        ):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        kwargs = {name: given for name, given in kwargs.items() if name not in CACHES}
        shape = hidden_states.shape[:-1]
        query, key, value = (
            projection(hidden_states).view(*shape, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output, weights = ALL_ATTENTION_FUNCTIONS[implementation](
            self,
            self._rotated(query, "q_norm", *position_embeddings),
            self._rotated(key, "k_norm", *position_embeddings),
            value.transpose(1, 2),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=_window_of(self),
            **kwargs,
        )
        return self.o_proj(output.reshape(*shape, -1)), weights

    def _rotated(self, x: Tensor, name: str, cosine: Tensor, sine: Tensor) -> Tensor:
        """Apply the norm, if there is one, to heads (B, T, H, D); rotate them, and return (B, H, T,
        D)."""
        norm = getattr(self, name, None)
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        if (own := _kernels_for(x, weight)) is not None:
            return own.rotary(x, weight, cosine, sine, epsilon).transpose(1, 2)
        x = (x if norm is None else norm(x)).transpose(1, 2)
        one, other = x.chunk(2, dim=-1)
        turned = torch.cat((-other, one), dim=-1)
        return x * cosine[:, None] + turned * sine[:, None]


def _window_of(attention: Any) -> int | None:
    """The layer's attribute `sliding_window` if it has one, otherwise that of the configuration."""
    own = getattr(attention.config, "sliding_window", None)
    window: int | None = getattr(attention, "sliding_window", own)
    return window


_KINDS = {"RMSNorm": _RMSNorm, "MLP": _MLP, "Attention": _Attention}


def install(model: nn.Module) -> None:
    """Make the modules of known classes in `model` use the fused kernels. Their attributes and the
    names of weights do not change."""
    for module in model.modules():
        if (kind := _kind_of(module)) is not None:
            theirs: Any = type(module)
            ours: Any = kind
            module.__class__ = asking(theirs, ours)


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    found = type(module)
    names = {f"{family}{kind}": ours for family in _FAMILIES for kind, ours in _KINDS.items()}
    kind = names.get(found.__name__)
    if kind is None or not found.__module__.startswith("transformers.models."):
        return None
    if kind is _MLP and type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return None
    return kind


@cache
def asking(theirs: Any, ours: Any) -> type[nn.Module]:
    """Return a subclass of both classes, named like `theirs`, with `ours` first in the method
    resolution order."""
    named = {"__module__": ours.__module__, "__qualname__": theirs.__qualname__}
    return type(theirs.__name__, (ours, theirs), named)
