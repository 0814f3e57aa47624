"""Engines make completions: `native` (fast, ours) and `hf` (transformers' `generate`)."""

from __future__ import annotations

from transformers import PreTrainedModel

from rloo.engines.hf import HFEngine
from rloo.engines.native import NativeEngine
from rloo.engines.sampling import noise_key
from rloo.engines.supported import supports
from rloo.types import Engine

__all__ = ["HFEngine", "NativeEngine", "build_engine", "noise_key", "supports"]


def build_engine(
    name: str, model: PreTrainedModel, *, pad_token_id: int
) -> tuple[Engine, str | None]:
    """The engine called `name` ("auto", "native" or "hf"), and one line for the user if it is
    another than asked for. "auto" is native where the model allows it."""
    if name not in ("auto", "native", "hf"):
        raise ValueError(f"engine is {name!r}; it must be auto, native or hf")
    if name == "hf":
        return HFEngine(model, pad_token_id=pad_token_id), None
    reason = supports(model)
    if reason is None:
        return NativeEngine(model, pad_token_id=pad_token_id), None
    note = f"sampling with transformers' generate (slower): the native engine cannot, {reason}"
    return HFEngine(model, pad_token_id=pad_token_id), note
