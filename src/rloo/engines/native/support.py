"""Checks whether the native engine can run a model: first by the configuration, then by a trial."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo.engines.in_process import in_inference_mode, layer_windows
from rloo.engines.native.native_engine import NativeEngine
from rloo.engines.trial_sampling import SAMPLING, trial_prompts, worst_error
from rloo.model import attention
from rloo.model.prepare_model import rounding_of
from rloo.types import Weights


def unavailable_reason(
    model: PreTrainedModel, *, weights: Weights | None = None, fused: bool = True
) -> str | None:
    """Why the native engine cannot run `model`, or None if it can. The model is not changed.

    The configuration is checked first. Then a trial samples completions with `fused` and `weights`
    (default: the model's parameters), and scores them again without our cache and attention.
    """
    if (reason := attention.unavailable_reason(model)) is not None:
        return f"because {reason}"
    implementation = model.config._attn_implementation
    try:
        attention.install(model)
        return _check_windows(model) or _check_probe(
            model, implementation, weights or model.named_parameters, fused
        )
    except Exception as error:  # model code may fail in any way; there is a fallback
        return f"because a trial of it failed: {type(error).__name__}: {error}"
    finally:
        model.set_attn_implementation(implementation)


class _WindowRecorder:
    """Records the window that each layer passes to its attention."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: attention.AttentionOptions
    ) -> Tensor:
        self.windows.append(options.sliding_window)
        return attention.attend(query, key, value, None, options).transpose(1, 2)


def _check_windows(model: PreTrainedModel) -> str | None:
    """Check the layers' windows. A trial does not detect errors of windows that are longer than its
    prompts."""
    recorder = _WindowRecorder()
    with in_inference_mode(model):
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device),
            attention_mask=attention.no_mask(model.device),
            use_cache=False,
            rloo_layout=recorder,
        )
    expected = layer_windows(model)
    if (calls := len(recorder.windows)) != len(expected):
        return f"because {calls} of its {len(expected)} layers call the attention function"
    if recorder.windows != expected:
        return "because its layers do not tell the attention function their sliding windows"
    return None


def _check_probe(
    model: PreTrainedModel, implementation: str, weights: Weights, fused: bool
) -> str | None:
    prompts = trial_prompts(model, (2, 5))
    engine = NativeEngine(model, pad_token_id=0, fused=fused)
    engine.load(weights, version=0)
    groups = engine.sample(prompts, 2, SAMPLING, noise=0)
    model.set_attn_implementation(implementation)
    worst = worst_error(model, prompts, groups)
    if worst > rounding_of(model):
        return f"because its log-probabilities would be off by {worst:.1e}"
    return None
