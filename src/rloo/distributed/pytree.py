"""Converts nested values to tensors and JSON, without pickle. Checkpoints and messages use this
format."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from rloo.distributed.value_codec import Codec, Place, path_of

# The key of the JSON part. Names of tensors begin with a slash, or are empty.
_PLAIN = "plain"
Flat = tuple[dict[str, Tensor], Any]
_CODEC = Codec({"tuple": "tuple", "dict": "dict"}, exact=True)


def flatten(tree: Any) -> Flat:
    """Convert nested dicts, lists and tuples to named tensors and JSON values. `unflatten` converts
    them back. JSON alone would turn tuples into lists and the keys of dicts into strings."""
    tensors: dict[str, Tensor] = {}

    def take(value: Any, place: Place) -> Any:
        path = path_of(place)
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"{path} of the state is a {kind}, which is not saved")
        if path in tensors:
            raise ValueError(f"two tensors of the state have the name {path}")
        tensors[path] = value.detach()
        return {"tensor": path}

    return tensors, _CODEC.encode(tree, take)


def unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    return _CODEC.decode(value, lambda _, name: tensors[name])


def encode(value: Any) -> bytes:
    """Convert a nested value to bytes, without loss. See `flatten` for the possible values."""
    tensors, plain = flatten(value)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = bytearray(json.dumps(plain, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    return save({**contiguous, _PLAIN: torch.frombuffer(text, dtype=torch.uint8)})


def decode(data: bytes) -> Any:
    """The inverse of `encode`; tensors are on the CPU."""
    tensors = load(data)
    text = bytes(tensors.pop(_PLAIN).numpy()).decode("utf-8", "surrogatepass")
    return unflatten(json.loads(text), tensors)
