"""A frozen base of 4 or 8 bits: how it is loaded, what it computes, its weights in full.

The one file that knows the library bitsandbytes, which is imported where quantised models are used.
Knows nothing of adapters or optimizers.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rloo.config.config import RLOOConfig


def quantization_of(config: RLOOConfig, given: Any = None) -> Any:
    """transformers' BitsAndBytesConfig for loading the base, or None for weights as they are.

    From `given` (the trainer's `quantization_config`), `load_in_4bit` or `load_in_8bit`, or
    `quantization_config` in `model_init_kwargs`. Raises ValueError for more than one of them, and
    for kinds that are not part of this version.
    """
    named = {
        "quantization_config": given,
        "model_init_kwargs": (config.model_init_kwargs or {}).get("quantization_config"),
        "load_in_4bit": config.load_in_4bit or None,
        "load_in_8bit": config.load_in_8bit or None,
    }
    chosen = {name: value for name, value in named.items() if value is not None}
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} each say how the base is quantised; give one of them"
        )
    if not chosen:
        return None
    _bitsandbytes()
    from transformers import BitsAndBytesConfig

    ((name, value),) = chosen.items()
    if name == "load_in_4bit":
        value = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=config.use_bnb_nested_quant,
            bnb_4bit_compute_dtype=_precision(config),
        )
    elif name == "load_in_8bit":
        value = BitsAndBytesConfig(load_in_8bit=True)
    elif isinstance(value, dict):
        value = _from_dict(value)
    _check(value)
    return value


def _from_dict(values: dict[str, Any]) -> Any:
    """transformers would drop a name that it does not know."""
    from transformers import BitsAndBytesConfig

    known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
    for name in values.keys() - known - {"quant_method"}:
        raise ValueError(f"quantization_config has {name}, which BitsAndBytesConfig does not know")
    return BitsAndBytesConfig(**values)


def _check(value: Any) -> None:
    from transformers import BitsAndBytesConfig

    if not isinstance(value, BitsAndBytesConfig):
        raise ValueError(
            f"quantization_config is a {type(value).__name__}; transformers' BitsAndBytesConfig is "
            "the one that is part of this version"
        )
    if not (value.load_in_4bit or value.load_in_8bit):
        raise ValueError("quantization_config sets neither load_in_4bit nor load_in_8bit")
    for name in ("llm_int8_has_fp16_weight", "llm_int8_enable_fp32_cpu_offload"):
        if getattr(value, name):
            raise ValueError(
                f"quantization_config sets {name}; the whole base is of few bits here, and on one "
                "device"
            )


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of 4 or 8 bits, by name."""
    for name, module in model.named_modules():
        if is_quantised(module):
            yield name, module


def is_quantised(module: nn.Module) -> bool:
    """Whether this very module keeps its weight in few bits. Whoever has one has imported
    bitsandbytes."""
    if "bitsandbytes" not in sys.modules:
        return False
    kinds = _bitsandbytes().nn
    return isinstance(module, (kinds.Linear4bit, kinds.Linear8bitLt))


def prepare(model: Any, config: RLOOConfig, *, adapted: bool) -> list[str]:
    """Make quantised layers multiply by their weights in full, and nothing else; returns notes.

    bitsandbytes' own products depend on more than the weights: of 8 bits they round activations,
    in a way that depends on the other rows of the batch; of 4 bits on some CPUs they become bf16
    where no gradients are wanted. A sampler and a trainer would then disagree about the policy.
    Raises ValueError for a quantised base without an adapter, of another kind than bitsandbytes',
    or changed by a forward of its own, and where one was asked for and the model has none.
    """
    layers = list(quantised_layers(model))
    kind = getattr(model, "quantization_method", None)
    if not layers:
        if kind is not None and getattr(model, "is_quantized", False):
            raise ValueError(
                f"the model is quantised by {getattr(kind, 'value', kind)}; bitsandbytes is the "
                "kind that is part of this version (model)"
            )
        for name in ("load_in_4bit", "load_in_8bit"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} is true and the model has no layer of few bits; one that is given "
                    f"loaded stays as it is ({name}, model)"
                )
        return []
    if not adapted:
        raise ValueError(
            f"{layers[0][0]} is quantised and cannot be trained; train an adapter (use_peft, "
            "peft_config) or load the model in full"
        )
    for name, layer in layers:
        if _is_4bit(layer):
            _check_4bit(name, layer)
        layer.forward = partial(_multiply, layer)
    return [_describe(model, layers)]


def _check_4bit(name: str, layer: Any) -> None:
    state = layer.weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise ValueError(
            f"the model was run on this CPU before it was given, for which bitsandbytes rounded "
            f"the scales of {name} to bf16; load it again, or give its name (model)"
        )
    if state.shape[-1] % state.blocksize == 0:
        return
    # Version 0.50 begins a new block with every row when it reads a weight on a CPU.
    in_one_row = copy(state)
    in_one_row.shape = (1, math.prod(state.shape))
    read = _bitsandbytes().functional.dequantize_4bit(layer.weight.data, in_one_row)
    if not torch.equal(read.flatten(), full_weight(layer).flatten()):
        raise ValueError(
            f"{name} has {state.shape[-1]} columns, no multiple of {state.blocksize}; this version "
            "of bitsandbytes reads it wrong here (load_in_8bit)"
        )


def _describe(model: nn.Module, layers: list[tuple[str, Any]]) -> str:
    few = sum(layer.in_features * layer.out_features for _, layer in layers)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base = count_parameters(model) - adapter
    bits = "4" if _is_4bit(layers[0][1]) else "8"
    return (
        f"{few / base:.0%} of the base's weights are of {bits} bits; products are with "
        "the weights in full, activations are not rounded, in the precision of the run (bf16, "
        "fp16), whatever llm_int8_threshold and bnb_4bit_compute_dtype say"
    )


def full_weight(layer: Any) -> Tensor:
    """(out, in): what the layer's few bits stand for, in float32 (4 bits: the type it had)."""
    functional = _bitsandbytes().functional
    if _is_4bit(layer):
        return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return functional.int8_vectorwise_dequant(layer.weight.data, _row_scales(layer))


def in_full(layer: Any) -> Any:
    """A plain layer that computes the same, in float32 and kept by nobody; `layer` itself if it is
    not quantised."""
    if not is_quantised(layer):
        return layer
    weight = full_weight(layer)
    plain = nn.Linear(1, 1, bias=False)
    plain.weight = nn.Parameter(weight.float(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return plain


def count_parameters(model: nn.Module) -> int:
    """Numbers that the model's weights stand for: two 4-bit ones in a byte are two."""
    packed = {id(layer.weight): layer for _, layer in quantised_layers(model)}
    return sum(
        layer.in_features * layer.out_features
        if (layer := packed.get(id(parameter))) is not None
        else parameter.numel()
        for parameter in model.parameters()
    )


def statistics_bytes(model: nn.Module) -> int:
    """Bytes beside the packed weights, which are no parameters: scales and code books."""
    tensors = []
    for _, layer in quantised_layers(model):
        if not _is_4bit(layer):
            tensors.append(_row_scales(layer))
            continue
        state = layer.weight.quant_state
        for part in (state, state.state2):
            if part is not None:
                tensors += [part.absmax, part.code, part.offset]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, Tensor)
    }
    return sum(storages.values())


class _Product(torch.autograd.Function):
    """states @ weight.T + bias. The full weight exists while it is used, forward and backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(states.dtype)
        return F.linear(states, full_weight(layer).to(states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient @ full_weight(ctx.layer).to(gradient.dtype), None


def _multiply(layer: Any, states: Tensor) -> Tensor:
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))
    product: Tensor = _Product.apply(states, layer)
    return product


def _is_4bit(layer: Any) -> bool:
    return isinstance(layer, _bitsandbytes().nn.Linear4bit)


def _row_scales(layer: Any) -> Tensor:
    # bitsandbytes' forward moves them from one place to the other.
    scales = getattr(layer.weight, "SCB", None)
    found: Tensor = layer.state.SCB if scales is None else scales
    return found


def _precision(config: RLOOConfig) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            "a base of 4 or 8 bits needs the library bitsandbytes: pip install "
            "'rloo[peft,quantization]' (load_in_4bit, load_in_8bit, quantization_config)"
        ) from error
    return bitsandbytes
