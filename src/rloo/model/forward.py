"""What training has to know of transformers' models: noise, heads, hidden states, memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rloo.model.batch import MicroBatch

# Attributes of modules that make their forward random.
NOISE = re.compile("dropout|pdrop|jitter|layerdrop")


def remove_dropout(model: PreTrainedModel) -> float:
    """Make the forward free of noise, which would make the ratio differ from 1 and the KL at step 0
    from 0; returns the largest probability found.

    The model stays in evaluation mode; only checkpointed layers think that they are training,
    because transformers recomputes nothing otherwise.
    """
    found = 0.0
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            found, module.p = max(found, module.p), 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and value > 0 and NOISE.search(name):
                found = max(found, value)
                setattr(module, name, 0.0)
    return found


def ensure_float32(model: PreTrainedModel, *, adapted: bool) -> list[str]:
    """Make trained parameters float32, since smaller ones lose updates at these learning rates;
    returns notes. Raises ValueError for layers trained as a whole beside an adapter, whose base
    stays as it was loaded.
    """
    precise = (torch.float32, torch.float64)
    small = [
        (name, parameter.dtype)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dtype not in precise
    ]
    if not small:
        return []
    name, dtype = small[0]
    if adapted:
        raise ValueError(
            f"parameter {name} is {dtype}; trained parameters must be float32, and the base of an "
            "adapter stays as it is (load the model with dtype=torch.float32; bf16 is the "
            "precision of the computation)"
        )
    model.float()
    return [
        f"the model was loaded in {dtype}; its weights are float32 now, since smaller ones lose "
        "updates at these learning rates (bf16 is the precision of the computation)"
    ]


def copy_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of its own weights that takes no gradients: the reference."""
    frozen = copy.deepcopy(model).eval()
    return frozen.requires_grad_(False)


def enable_checkpointing(model: PreTrainedModel, options: dict[str, Any] | None) -> None:
    """Recompute the layers' activations in the backward; `options` are torch's."""
    # The name changed in transformers 5.2x; the old one warns there.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False, **(options or {})})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def token_budget(model: PreTrainedModel, device: torch.device) -> int:
    """Input tokens of a micro-batch, from memory: activations may take a quarter of what is free.

    A layer keeps about 34 numbers per hidden unit for the backward (Korthikanti et al. 2022,
    without the attention scores), and the output head a few per vocabulary entry.
    """
    text_config = model.config.get_text_config()
    numbers = 34 * text_config.hidden_size * text_config.num_hidden_layers
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return max(1024, min(65536, free // 4 // (4 * numbers)))
    # Beyond this a CPU gains nothing, and loses its caches.
    return max(1024, min(8192, 2**32 // (4 * numbers)))


def hidden_states(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """(T, D): the states that predict the batch's completion tokens."""
    return _states(model.base_model(**batch.inputs, use_cache=False), batch)


def routed_states(model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same of a mixture of experts, and its router's logits: per layer (tokens, experts)."""
    outputs = model.base_model(**batch.inputs, use_cache=False, output_router_logits=True)
    return _states(outputs, batch), outputs.router_logits


def own_logprobs(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> Tensor:
    """(T,): log-probs of the batch's completion tokens from the logits that the model itself
    computes, output head and all. What we compute is compared with it."""
    logits = model(**batch.inputs, use_cache=False).logits.flatten(0, 1)
    chosen = logits[batch.source_T].float() / temperature
    return chosen.log_softmax(-1).gather(-1, batch.target_T[:, None])[:, 0]


def _states(outputs: Any, batch: MicroBatch) -> Tensor:
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, batch.source_T)


def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits, with the scalings that some architectures apply after the matrix."""
    text_config = model.config.get_text_config()
    matrix = model.get_output_embeddings()
    softcap = getattr(text_config, "final_logit_softcapping", None)
    multiplier = getattr(text_config, "logit_scale", None) or 1.0
    multiplier /= getattr(text_config, "logits_scaling", None) or 1.0

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = matrix(hidden)
        if multiplier != 1.0:
            logits = logits * multiplier
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    return head
