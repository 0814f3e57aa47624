"""Nested values as tensors and JSON: what checkpoints and messages are made of, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

# The name of what is no tensor; those of tensors begin with a slash, or are empty.
_PLAIN = "plain"
Flat = tuple[dict[str, Tensor], Any]


def flatten(tree: Any) -> Flat:
    """Nested dicts, lists and tuples as named tensors and JSON values, which `unflatten` converts
    back. JSON alone would turn tuples into lists and the keys of dicts into strings."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if path in tensors:
                raise ValueError(f"two tensors of the state have the name {path}")
            tensors[path] = value.detach()
            return {"tensor": path}
        if isinstance(value, dict):
            return {"dict": [[k, walk(v, f"{path}/{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [walk(v, f"{path}/{i}") for i, v in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise ValueError(f"{path} of the state is a {type(value).__name__}, which is not saved")

    return tensors, walk(tree, "")


def unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(value, list):
        return [unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(unflatten(item, tensors) for item in content)
    return {
        tuple(key) if isinstance(key, list) else key: unflatten(item, tensors)
        for key, item in content
    }


def encode(value: Any) -> bytes:
    """A nested value that `flatten` takes as bytes, to the last bit."""
    tensors, plain = flatten(value)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = bytearray(json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return save({**contiguous, _PLAIN: torch.frombuffer(text, dtype=torch.uint8)})


def decode(data: bytes) -> Any:
    """The inverse of `encode`; tensors are on the CPU."""
    tensors = load(data)
    text = bytes(tensors.pop(_PLAIN).numpy()).decode("utf-8", "surrogatepass")
    return unflatten(json.loads(text), tensors)
