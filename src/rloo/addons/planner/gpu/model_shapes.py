"""The shape of a model, as far as costs depend on it: parameters, operations, cache per token."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

_UNITS = {"m": 1e6, "b": 1e9, "": 1.0}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with attention and a gated feed-forward part in each layer. `products` is the
    number of parameters in matrices that multiply each token, with the output matrix of the
    vocabulary and without the embedding lookup. `origin` describes the source."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    products: int
    vocabulary: int
    origin: str

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token's keys and values in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def operations(self, context: float) -> float:
        """Operations of a token's forward pass after `context` tokens: two per parameter in
        `products`, and four per head dimension and attended token."""
        return 2.0 * self.products + 4.0 * self.layers * self.heads * self.head_dim * context


def _known(name: str, layers: int, hidden: int, heads: int, feed: int, matrices: int) -> ModelShape:
    """A shape with eight key-value heads of 128 dimensions, as all models of TYPICAL have.
    `matrices` is the number of vocabulary matrices: one (tied) or two."""
    vocabulary = 128256 if name.startswith("Llama") else 151936
    attention = 2 * hidden * heads * 128 + 2 * hidden * 8 * 128
    products = layers * (attention + 3 * hidden * feed) + hidden * vocabulary
    parameters = products + (matrices - 1) * hidden * vocabulary
    origin = f"the shape of {name}, from its config.json"
    return ModelShape(name, layers, hidden, heads, 8, 128, parameters, products, vocabulary, origin)


TYPICAL = (
    _known("Qwen3-0.6B", 28, 1024, 16, 3072, 1),
    _known("Qwen3-1.7B", 28, 2048, 16, 6144, 1),
    _known("Qwen3-4B", 36, 2560, 32, 9728, 1),
    _known("Qwen3-8B", 36, 4096, 32, 12288, 2),
    _known("Qwen3-14B", 40, 5120, 40, 17408, 2),
    _known("Qwen3-32B", 64, 5120, 64, 25600, 2),
    _known("Llama-3-70B", 80, 8192, 64, 28672, 2),
)


def shape_of_size(text: str) -> ModelShape:
    """The typical shape nearest to a size such as 7B or 600M, with the number of layers adjusted to
    the size. Raises ValueError for an invalid size."""
    found = re.fullmatch(r"([0-9.]+)\s*([mMbB]?)", text.strip())
    try:
        size = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    except ValueError:
        size = 0.0
    if not 1e8 <= size <= 1e12:
        raise ValueError(
            f"parameters is {text}; it must be a size from 100M to 1000B, as 7B (parameters)"
        )
    near = min(TYPICAL, key=lambda shape: max(shape.parameters / size, size / shape.parameters))
    ends = near.vocabulary * near.hidden
    layer = (near.products - ends) / near.layers
    layers = max(1, round((size - (near.parameters - layer * near.layers)) / layer))
    more = round(layer * (layers - near.layers))
    return replace(
        near,
        name=text,
        layers=layers,
        parameters=near.parameters + more,
        products=near.products + more,
        origin=f"{near.origin}, with {layers} layers",
    )


def shape_of_config(name: str, config: Any) -> ModelShape:
    """The shape of a model's configuration, counted on a module without weights. Raises ValueError
    for a mixture of experts."""
    import torch
    import transformers

    from rloo.config.file_checks import largest_of_layers
    from rloo.model.attention import head_size, num_kv_heads

    config = config.get_text_config()
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise ValueError(
            f"the model {name} is a mixture of experts, of which a plan of GPUs knows no costs in "
            "this version; give its active size (parameters)"
        )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    lookup = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is lookup
    heads = largest_of_layers(config, "num_attention_heads")
    return ModelShape(
        name=name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=num_kv_heads(config),
        head_dim=head_size(config),
        parameters=sum(p.numel() for p in model.parameters()),
        products=matrices - (0 if tied else lookup.numel()),
        vocabulary=config.vocab_size,
        origin="counted from its configuration",
    )
