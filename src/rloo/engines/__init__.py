"""Engines sample completions: `native` (fast, our own) and `hf` (transformers' `generate`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo.engines.hf import HFEngine
from rloo.engines.native.engine import NativeEngine
from rloo.engines.native.fused import can_fuse
from rloo.engines.native.supported import supports
from rloo.engines.noise import noise_key
from rloo.types import Engine

__all__ = ["HFEngine", "NativeEngine", "build_engine", "noise_key", "supports"]


def build_engine(
    name: str,
    model: PreTrainedModel,
    *,
    pad_token_id: int,
    weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    dtype: torch.dtype | None = None,
    no_copy: str | None = None,
) -> tuple[Engine, str | None]:
    """The engine called `name` ("auto", "native" or "hf"), and a note for the user if it is another
    or slower one than expected. "auto" is native if the model allows it.

    `weights()` returns the weights that `load` will get (by default the model's parameters).
    `dtype` is that of the fused decoder's matrix products (by default the model's); other samplers
    have no dtype of their own. `no_copy` is the reason, if any, why the weights must not be copied,
    as the fused decoder does.
    """
    if name not in ("auto", "native", "hf"):
        raise ValueError(f"engine is {name!r}; it must be auto, native or hf")
    weights = weights or model.named_parameters
    if name == "hf":
        return HFEngine(model, pad_token_id=pad_token_id), None
    if no_copy is None and can_fuse(model) and supports(model, weights=weights) is None:
        return NativeEngine(model, pad_token_id=pad_token_id, dtype=dtype), None
    reason = supports(model, fused=False)
    if reason is None:
        why = no_copy or "there is no fused decoder for this architecture"
        note = f"sampling runs {type(model).__name__} layer by layer, which is slower: {why}"
        return NativeEngine(model, pad_token_id=pad_token_id, fused=False), note
    note = (
        "sampling with transformers' generate, which is slower: the native engine does not support "
        f"this model, {reason}"
    )
    return HFEngine(model, pad_token_id=pad_token_id), note
