"""Sampling with the policy's own module within bounded memory, and restoring the module's state.

Both engines run the module that is being trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo.engines.sampling import check_request, collect_completions
from rloo.types import Completion, Prompt, Sampling

# One row: a prompt and the sample's number k in its group.
Row = tuple[Prompt, int]
# Tokens, policy and behavior log-probs, each (R, max_tokens), and the lengths (R,) at which a stop
# string was complete.
Drawn = tuple[Tensor, Tensor, Tensor, Tensor]


@contextmanager
def borrowed(model: PreTrainedModel) -> Iterator[None]:
    """Inside, evaluation mode without autograd; afterwards each submodule's mode is restored.

    Gradient checkpointing is inactive in evaluation mode, and `use_cache` is passed with each
    forward, so neither setting is changed. Inside, a mixture of experts does not return its
    router's logits, whatever its configuration says, since a cached forward has no balancing loss.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    text_config = model.config.get_text_config()
    routed = getattr(text_config, "output_router_logits", False)
    if routed:
        text_config.output_router_logits = False
    try:
        # Not inference_mode, in which autocast would cast every weight again for every token.
        autocast = torch.is_autocast_enabled(model.device.type)
        with torch.no_grad() if autocast else torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
        if routed:
            text_config.output_router_logits = routed
        # Autocast caches the low-precision copies of weights made here, which a later forward with
        # gradients cannot use.
        torch.clear_autocast_cache()


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer according to the configuration, None for full attention."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def cache_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token over all layers (an upper estimate)."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # The caches are at least float32.
    return 2 * config.num_hidden_layers * kv_heads * width * max(4, model.dtype.itemsize)


def sample_in_waves(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    num_samples: int,
    sampling: Sampling,
    *,
    cache_bytes: int,
    sample_rows: Callable[[list[Row]], Drawn],
) -> list[list[Completion]]:
    """`Engine.sample` for an engine that samples `Row`s, as many at once as `cache_bytes`
    allows."""
    check_request(prompts, num_samples, sampling)
    if not prompts:
        return []
    # Sorted, so that prompts of similar length come together and little is padded.
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
    rows = [(index, k) for index in by_length for k in range(num_samples)]
    longest = len(prompts[by_length[-1]].token_ids)
    wave = rows_at_once(model, longest, sampling.max_tokens, cache_bytes=cache_bytes)
    completions: dict[tuple[int, int], Completion] = {}
    with borrowed(model):
        for start in range(0, len(rows), wave):
            part = rows[start : start + wave]
            drawn = sample_rows([(prompts[index], k) for index, k in part])
            finished = collect_completions(drawn, sampling.stop_token_ids)
            completions.update(zip(part, finished, strict=True))
    return [[completions[index, k] for k in range(num_samples)] for index in range(len(prompts))]


def bytes_per_row(model: PreTrainedModel, prompt_tokens: int, max_tokens: int) -> int:
    """An upper bound of the bytes needed to sample one completion.

    It counts the keys and values of the prompt and the completion, four float32 numbers per
    vocabulary entry while a token is drawn, and the tokens with their two log-probs.
    """
    vocabulary = model.config.get_text_config().vocab_size
    cached = cache_bytes_per_token(model) * (prompt_tokens + max_tokens)
    return cached + 16 * vocabulary + 16 * max_tokens


def rows_at_once(
    model: PreTrainedModel, prompt_tokens: int, max_tokens: int, *, cache_bytes: int
) -> int:
    """The number of rows that fit into `cache_bytes`, at least 1."""
    return max(1, cache_bytes // bytes_per_row(model, prompt_tokens, max_tokens))
