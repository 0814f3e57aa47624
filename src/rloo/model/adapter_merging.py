"""Iterates over the weights of an adapted model, layer by layer: those of the base model, or the
base weights with the adapter merged in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rloo.config.optional_packages import layer_kinds, peft_library
from rloo.distributed.sharded_tensor import full_tensor, whole_copy
from rloo.model.quantization import in_full, is_quantised

# peft's name for the adapter that `get_peft_model` makes.
TRAINED = "default"


def walk(
    module: nn.Module,
    unwrap: Callable[[nn.Module], nn.Module],
    prefix: str = "",
    seen: set[int] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and full tensors of `named_parameters`. A layer that has an adapter is
    replaced by `unwrap(layer)`; other quantised layers are dequantised."""
    seen = set() if seen is None else seen
    inner = unwrap(module) if isinstance(module, layer_kinds()) else in_full(module)
    replaced = inner is not module
    for name, parameter in inner.named_parameters(recurse=replaced):
        # A tied weight is yielded once. Only this loop refers to the replacement layer, so the
        # layer is freed after the loop.
        if replaced or id(parameter) not in seen:
            yield prefix + name, full_tensor(parameter)
        if not replaced:
            seen.add(id(parameter))
    if not replaced:
        for name, child in module.named_children():
            yield from walk(child, unwrap, f"{prefix}{name}.", seen)


@torch.no_grad()
def merged_layer(layer: Any) -> Any:
    """Return a layer of the base layer's type with the adapter merged in."""
    if isinstance(layer, peft_library().utils.ModulesToSaveWrapper):
        return layer.modules_to_save[TRAINED]
    merged = whole_copy(layer)
    if is_quantised(layer.get_base_layer()):
        return _merge_in_full(merged)
    # peft wraps a module with two adapted parameters in two layers.
    while hasattr(merged, "base_layer"):
        merged.merge(adapter_names=[TRAINED])
        merged = merged.base_layer
    return merged


def _merge_in_full(layer: Any) -> nn.Linear:
    """Merge without peft, which would quantise the result again."""
    plain = in_full(layer.get_base_layer())
    variant = layer.lora_variant.get(TRAINED)
    if variant is None:
        plain.weight += layer.get_delta_weight(TRAINED)
    else:
        plain.weight.copy_(variant.merge_safe(layer, TRAINED, plain.weight))
    return plain


def original_layer(layer: Any) -> nn.Module:
    """Return the base model's layer, dequantised, without the adapter."""
    if isinstance(layer, peft_library().utils.ModulesToSaveWrapper):
        return layer.original_module
    return in_full(layer.get_base_layer())


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Iterate over the layers that have an adapter, with their names."""
    kinds = layer_kinds() if "peft" in sys.modules else ()
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, kinds))
