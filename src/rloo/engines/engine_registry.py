"""Builds an engine by its name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rloo.config.engine_spec import engine_spec
from rloo.engines.in_process import GatherWeights, InProcessEngine, Tell
from rloo.types import Engine, Weights


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """The inputs of an engine. `weights` returns the weights that `load` will get (default: the
    model's parameters). `precision` is the dtype of the model's autocast. `dtype` is the dtype of
    the fused decoder's matrix products (default: the model's). `no_copy` is the reason why the
    fused decoder must not copy the weights, or None. Within the context `whole()` this process has
    all weights; outside, the weights may be sharded. `tell` receives messages for the user during
    sampling. `policy` (a `Policy`, with the run's options as `config`) and `log_folder` (for the
    output of other processes) are for engines that run in other processes."""

    model: PreTrainedModel
    pad_token_id: int
    weights: Weights | None = None
    precision: torch.dtype | None = None
    dtype: torch.dtype | None = None
    no_copy: str | None = None
    whole: GatherWeights = nullcontext
    tell: Tell = print
    policy: Any = None
    log_folder: Path | None = None


# The engine, and a note for the user if the engine is not the expected one, or slower.
Made = tuple[Engine, str | None]


def build_engine(name: str, inputs: EngineInputs) -> Made:
    """Build the engine `name`; "auto" is native if the model allows it. Raises ValueError for an
    unknown name."""
    made: Made = engine_spec(name).make(inputs)
    engine, note = made
    if isinstance(engine, InProcessEngine):
        engine.tell = inputs.tell
    return engine, note


def _make_native(inputs: EngineInputs) -> Made:
    from rloo.engines.native.fused_decoder import can_fuse
    from rloo.engines.native.native_engine import NativeEngine
    from rloo.engines.native.support import unavailable_reason

    model, no_copy = inputs.model, inputs.no_copy
    make = partial(
        NativeEngine,
        model,
        pad_token_id=inputs.pad_token_id,
        precision=inputs.precision,
        whole=inputs.whole,
    )
    if (
        no_copy is None
        and can_fuse(model)
        and unavailable_reason(model, weights=inputs.weights) is None
    ):
        return make(dtype=inputs.dtype), None
    if (reason := unavailable_reason(model, fused=False)) is not None:
        note = (
            "sampling with transformers' generate, which is slower: the native engine does not "
            f"support this model, {reason}"
        )
        engine, more = _make_hf(inputs)
        return engine, note if more is None else f"{note}; {more}"
    why = no_copy or "its arithmetic is not among those that are fused"
    note = f"sampling runs {type(model).__name__} layer by layer, which is slower: {why}"
    return make(fused=False), note


def _make_hf(inputs: EngineInputs) -> Made:
    from rloo.engines.hf_engine import HFEngine, find_way

    way = find_way(inputs.model)
    engine = HFEngine(
        inputs.model,
        way=way,
        pad_token_id=inputs.pad_token_id,
        precision=inputs.precision,
        whole=inputs.whole,
    )
    name = type(inputs.model).__name__
    notes = {
        "one": f"completions are sampled one by one: {name} cannot compute several together",
        "one length": "prompts of different lengths are sampled one length after the other: "
        f"padding would go into the state of {name}",
    }
    told = [notes[way.rows]] if way.rows in notes else []
    if not way.cached:
        told.append(
            "every token is sampled by a pass over all before it: what would be kept of them "
            f"changes the log-probabilities of {name}"
        )
    return engine, "; ".join(told) or None


# Each function imports its own engine, so the libraries of other engines need not be installed.
MAKERS: dict[str, Callable[[EngineInputs], Made]] = {
    "auto": _make_native,
    "native": _make_native,
    "hf": _make_hf,
}
