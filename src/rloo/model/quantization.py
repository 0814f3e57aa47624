"""A frozen base quantised to 4 or 8 bits: loading, computing and dequantising it."""

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
from transformers import BitsAndBytesConfig

from rloo.config.config import RLOOConfig
from rloo.config.optional_packages import install
from rloo.distributed.sharded_tensor import shape_of
from rloo.kernels.bf16_rounding import in_float32, operands, reduced_precision, rounded
from rloo.kernels.cpu_matmul import rounds


def quantization_of(config: RLOOConfig, given: Any = None) -> Any:
    """The BitsAndBytesConfig to load the base with, or None to load it unquantised. It comes from
    the trainer (`given`), `load_in_4bit`, `load_in_8bit`, or `model_init_kwargs`. Raises ValueError
    if more than one of these is set, and for kinds of quantisation that this version does not
    support."""
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
    ((name, value),) = chosen.items()
    if name == "load_in_4bit":
        dtype = reduced_precision(config) or torch.float32
        value = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=config.use_bnb_nested_quant,
            bnb_4bit_compute_dtype=dtype,
        )
    elif name == "load_in_8bit":
        value = BitsAndBytesConfig(load_in_8bit=True)
    elif isinstance(value, dict):
        value = _from_dict(value)
    _check(value)
    return value


def _from_dict(values: dict[str, Any]) -> Any:
    """Build the config. Raises ValueError for unknown names, which transformers would ignore."""
    known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
    for name in values.keys() - known - {"quant_method"}:
        raise ValueError(f"quantization_config has {name}, which BitsAndBytesConfig does not know")
    return BitsAndBytesConfig(**values)


def _check(value: Any) -> None:
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
                f"quantization_config sets {name}; in this version the whole base is quantised and "
                "on one device"
            )


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The quantised layers, by name."""
    for name, module in model.named_modules():
        if is_quantised(module):
            yield name, module


def is_quantised(module: nn.Module) -> bool:
    """Whether this module itself has a quantised weight."""
    if "bitsandbytes" not in sys.modules:  # then no module is quantised
        return False
    kinds = _bitsandbytes().nn
    return isinstance(module, (kinds.Linear4bit, kinds.Linear8bitLt))


def prepare(model: Any, config: RLOOConfig, *, adapted: bool) -> list[str]:
    """Make quantised layers multiply by their dequantised weights; return notes.

    bitsandbytes' products do not depend only on the weights. With 8 bits, the rounding of
    activations depends on the other rows of the batch. With 4 bits, some CPUs compute in bf16 if no
    gradients are needed. The log-probs of sampler and trainer would then differ. `adapted` is
    whether the model has an adapter. Raises ValueError for a quantised base that has no adapter,
    that another library has quantised, or that an earlier forward has altered. Also raises
    ValueError if the options require quantised layers and the model has none.
    """
    layers = list(quantised_layers(model))
    if not layers:
        kind = getattr(model, "quantization_method", None)
        if kind is not None and getattr(model, "is_quantized", False):
            raise ValueError(
                f"the model is quantised by {getattr(kind, 'value', kind)}; bitsandbytes is the "
                "kind that is part of this version (model)"
            )
        for name in ("load_in_4bit", "load_in_8bit"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} is true and the model has no quantised layer; a model that is already "
                    f"loaded stays as it is ({name}, model)"
                )
        return []
    if not adapted:
        raise ValueError(
            f"{layers[0][0]} is quantised and cannot be trained; train an adapter (use_peft, "
            "peft_config) or load the model unquantised (load_in_4bit, load_in_8bit)"
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
            f"the model has been run on this CPU before, for which bitsandbytes rounded the scales "
            f"of {name} to bf16; load it again, or pass its name (model)"
        )
    if state.shape[-1] % state.blocksize == 0:
        return
    # bitsandbytes 0.50 starts a new block at every row when it dequantises on a CPU.
    in_one_row = copy(state)
    in_one_row.shape = (1, math.prod(state.shape))
    read = _bitsandbytes().functional.dequantize_4bit(layer.weight.data, in_one_row)
    if not torch.equal(read.flatten(), full_weight(layer).flatten()):
        raise ValueError(
            f"{name} has {state.shape[-1]} columns, not a multiple of {state.blocksize}; this "
            "version of bitsandbytes misreads it on a CPU (load_in_8bit)"
        )


def _describe(model: nn.Module, layers: list[tuple[str, Any]]) -> str:
    quantised = sum(layer.in_features * layer.out_features for _, layer in layers)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base = count_parameters(model) - adapter
    bits = "4" if _is_4bit(layers[0][1]) else "8"
    return (
        f"{quantised / base:.0%} of the base's weights are stored in {bits} bits; layers multiply "
        "by the dequantised weights in the precision of the run (bf16, fp16) and round no "
        "activations; llm_int8_threshold and bnb_4bit_compute_dtype have no effect"
    )


def full_weight(layer: Any) -> Tensor:
    """The layer's dequantised weight (out, in), in float32 (4 bits: in the original dtype)."""
    functional = _bitsandbytes().functional
    if _is_4bit(layer):
        return functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return functional.int8_vectorwise_dequant(layer.weight.data, _row_scales(layer))


def in_full(layer: Any) -> Any:
    """A new dequantised layer in float32, or `layer` itself if it is not quantised."""
    if not is_quantised(layer):
        return layer
    weight = full_weight(layer)
    plain = nn.Linear(1, 1, bias=False)
    plain.weight = nn.Parameter(weight.float(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return plain


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; two 4-bit parameters in one byte count as two."""
    sizes = {id(x.weight): x.in_features * x.out_features for _, x in quantised_layers(model)}
    return sum(sizes.get(id(p), shape_of(p).numel()) for p in model.parameters())


def statistics(model: nn.Module) -> list[Tensor]:
    """The quantisation statistics, which are not parameters: scales and code books."""
    tensors: list[Any] = []
    for _, layer in quantised_layers(model):
        if not _is_4bit(layer):
            tensors.append(_row_scales(layer))
            continue
        state = layer.weight.quant_state
        for part in (state, state.state2):
            if part is not None:
                tensors += [part.absmax, part.code, part.offset]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


class _QuantizedMatmul(torch.autograd.Function):
    """Computes states @ weight.T + bias. The dequantised weight exists only while it is used."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: Any, rounds: bool) -> Tensor:
        ctx.layer, ctx.rounds = layer, rounds
        weight, bias = full_weight(layer).to(states.dtype), layer.bias
        bias = None if bias is None else bias.to(states.dtype)
        if rounds:
            states, weight, bias = operands(states, weight, bias)
        return F.linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        grad, weight = gradients[0], full_weight(ctx.layer).to(gradients[0].dtype)
        if ctx.rounds:
            grad, weight = rounded(grad), rounded(weight)
        return grad @ weight, None, None


def _multiply(layer: Any, states: Tensor) -> Tensor:
    kind, rounding = states.device.type, rounds()
    if rounding:
        states = states.float()
    elif torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))
    with in_float32(rounding):
        return _QuantizedMatmul.apply(states, layer, rounding)


def _is_4bit(layer: Any) -> bool:
    return isinstance(layer, _bitsandbytes().nn.Linear4bit)


def _row_scales(layer: Any) -> Tensor:
    # bitsandbytes' forward moves the scales from one attribute to the other.
    scales = getattr(layer.weight, "SCB", None)
    return layer.state.SCB if scales is None else scales


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"a base of 4 or 8 bits needs the library bitsandbytes: {install('quantization')} "
            "(load_in_4bit, load_in_8bit, quantization_config)"
        ) from error
    return bitsandbytes
