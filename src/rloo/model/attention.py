"""The attention function that packed training and the native engine install in a model.

A model with the attention implementation `"rloo"` computes standard attention by default. If its
forward receives the keyword argument `rloo_layout`, every layer passes its queries, keys and values
to that layout. The layout is an argument, never a global, because gradient checkpointing runs the
forward again after the caller has returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rloo.config.file_checks import largest_of_layers
from rloo.data.images import is_vision_config
from rloo.kernels import torch_compat
from rloo.model import flash_gpu

IMPLEMENTATION = "rloo"


class AttentionLayout(Protocol):
    """Decides which keys each query attends to."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Map query (B, H, Q, D), key and value (B, H_kv, L, D) to the output (B, Q, H, D)."""


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """A layer's arguments to its attention function, except queries, keys and values."""

    scaling: float | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: Tensor | None = None

    def scaling_of(self, query: Tensor) -> float:
        """The factor that multiplies the scores; by default 1 / sqrt(head size)."""
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling


def head_size(config: Any) -> int:
    """The head size from a text model's configuration; the largest one if layers differ. For a
    model without attention heads, the head size is the hidden size."""
    heads = largest_of_layers(config, "num_attention_heads") or 1
    size: int = largest_of_layers(config, "head_dim") or config.hidden_size // heads
    return size


def num_kv_heads(config: Any) -> int:
    """The number of key-value heads of a text model; the largest, if layers differ. At least 1."""
    heads = largest_of_layers(config, "num_attention_heads") or 1
    found: int = largest_of_layers(config, "num_key_value_heads") or heads
    return found


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Softmax attention with grouped heads, logit soft-capping (Gemma 2) and sinks (GPT-OSS).

    query (B, H, Q, D); key and value (B, H_kv, L, D); mask bool, broadcastable to (B, 1, Q, L),
    True where a query attends to a key. Every query attends to at least one key. Returns (B, H, Q,
    D).
    """
    fused = partial(F.scaled_dot_product_attention, attn_mask=mask, scale=options.scaling)
    plain = options.sinks is None and options.softcap is None
    batch, heads, queries, _ = query.shape
    repeats = heads // key.shape[1]
    if repeats > 1 and queries == 1 and plain:
        # With one query per row, the heads of a group become the queries of one head: no key is
        # copied.
        folded = query.reshape(batch, key.shape[1], repeats, query.shape[-1])
        return fused(folded, key, value).reshape(batch, heads, 1, value.shape[-1])
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    if plain:
        return fused(query, key, value)
    return _attend_eagerly(query, key, value, mask, options)


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys, without sinks, and the log-sum-exp of the scores.

    query (B, H, Q, D); key and value (B, H, L, D); mask (B, 1, Q, L) is added to the scores.
    Returns (B, H, Q, D) and (B, H, Q, 1). The average of the outputs of two parts, weighted by
    exp(log-sum-exp), is the attention over the keys of both parts. For 16-bit inputs both results
    are float32.
    """
    fuses = options.softcap is None and query.shape[-1] == value.shape[-1]
    if fuses and flash_gpu.has_dense(query.device, query.dtype, query.shape[-1]):
        output, normalizer = flash_gpu.attend_dense(
            query, key, value, mask, options.scaling_of(query)
        )
        return output.to(normalizer.dtype), normalizer
    if query.device.type == "cpu" and options.softcap is None and torch_compat.has_cpu_flash():
        output, normalizer = torch_compat.cpu_flash(
            query, key, value, attn_mask=mask, scale=options.scaling
        )
        return output.to(normalizer.dtype), normalizer[..., None]
    query, key, value = (_at_least_float32(x) for x in (query, key, value))
    scores = _score(query, key, options)
    if mask is not None:
        scores = scores + mask
    normalizer = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - normalizer).exp() @ value, normalizer


def _score(query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """Products of queries (..., Q, D) and keys (..., L, D), scaled and soft-capped."""
    scores = (query @ key.transpose(-1, -2)).mul_(options.scaling_of(query))
    if options.softcap is None:
        return scores
    return torch.tanh(scores / options.softcap) * options.softcap


def _attend_eagerly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    dtype = value.dtype
    query, key, value = (round_inputs(x) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        scores = _score(query, key, options)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        if options.sinks is None:
            return (scores.softmax(dim=-1) @ value).to(dtype)
        sinks = options.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)
        return (weights[..., :-1] @ value).to(dtype)


def round_inputs(states: Tensor) -> Tensor:
    """Round queries, keys or values to autocast's dtype, as fused attention does, and return them
    in at least float32. With scores rounded to 16 bits, the log-probs of sampler and trainer would
    differ."""
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return _at_least_float32(states)


def _at_least_float32(states: Tensor) -> Tensor:
    return states.float() if states.dtype.itemsize < 4 else states


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    rloo_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    options = AttentionOptions(
        scaling=scaling, softcap=softcap, sliding_window=sliding_window, sinks=s_aux
    )
    if rloo_layout is not None:
        return rloo_layout.attend(query, key, value, options), None
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = causal_mask(query.shape[2], key.shape[2], query.device, sliding_window)
    output = attend(query, key, value, attention_mask, options)
    return output.transpose(1, 2).contiguous(), None


def causal_mask(
    queries: int, keys: int, device: torch.device, sliding_window: int | None = None
) -> Tensor:
    """A bool mask (queries, keys), True where a query attends. The queries are the last
    positions."""
    key = torch.arange(keys, device=device)
    distance = key[keys - queries :, None] - key
    mask = distance >= 0
    return mask if sliding_window is None else mask & (distance < sliding_window)


def no_mask(device: torch.device) -> Tensor:
    """A placeholder mask, which transformers passes on unchanged. Without a given mask,
    transformers builds one with tokens x tokens elements."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def install(model: PreTrainedModel) -> None:
    """Make `model` accept `rloo_layout`. Raises ValueError if transformers does not support it."""
    AttentionInterface.register(IMPLEMENTATION, _attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)


def unavailable_reason(model: PreTrainedModel) -> str | None:
    """Return the reason why attention layouts do not work for `model`, or None. Reads only the
    configuration."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model"
    if is_vision_config(model.config):
        return f"{type(model).__name__} reads images"
    types = set(getattr(config, "layer_types", None) or [])
    if other := sorted(types - {"full_attention", "sliding_attention"}):
        return f"{type(model).__name__} has layers of type {', '.join(other)}"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} does not let its attention function be replaced"
    return None
