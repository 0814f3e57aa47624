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
    vocabulary and without the embedding lookup. `sides` is the sum of inputs and outputs of all
    matrices in the layers, to which adapters are added. In a mixture of experts, `chosen` of
    `experts` experts multiply a token, and all experts have `expert_parameters` parameters.
    `origin` describes the source."""

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
    sides: int = 0
    experts: int = 0
    chosen: int = 0
    expert_parameters: int = 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token's keys and values in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def linear(self) -> int:
        """The parameters in the matrices of the layers, without experts: those that bitsandbytes
        quantises."""
        of_experts = self.expert_parameters * self.chosen // self.experts if self.experts else 0
        return self.products - self.hidden * self.vocabulary - of_experts

    def operations(self, context: Any) -> Any:
        """Operations of a token's forward pass after `context` tokens: two per parameter in
        `products`, and four per head dimension and attended token."""
        return 2.0 * self.products + self.attention(context)

    def attention(self, context: Any) -> Any:
        """Operations of attention for one token that attends to `context` positions."""
        return 4.0 * self.layers * self.heads * self.head_dim * context

    def read(self, rows: Any) -> Any:
        """The parameters in matrices that a decoding step of `rows` rows reads: of the experts,
        those that at least one row has chosen."""
        if not self.experts:
            return self.products
        share = self.chosen / self.experts
        untouched = (1 - share) ** rows
        return self.products + self.expert_parameters * (1 - share - untouched)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes in a model's config.json. `feed` is the width of the feed-forward part, or of an
    expert. `matrices` is the number of vocabulary matrices: one (tied) or two."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed: int
    vocabulary: int
    matrices: int
    experts: int = 0
    chosen: int = 0

    def shape(self, name: str, origin: str) -> ModelShape:
        """The shape of a model with these sizes."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        hidden, ends = self.hidden, self.hidden * self.vocabulary
        attention = 2 * hidden * (query + key) + hidden * self.experts
        sides = 4 * hidden + 2 * query + 2 * key
        expert = 3 * hidden * self.feed
        # A model without experts has one that multiplies every token.
        products = self.layers * (attention + expert * (self.chosen or 1)) + ends
        unused = self.layers * expert * (self.experts - self.chosen)
        return ModelShape(
            name=name,
            layers=self.layers,
            hidden=hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            parameters=products + unused + (self.matrices - 1) * ends,
            products=products,
            vocabulary=self.vocabulary,
            origin=origin,
            sides=self.layers * (sides + (0 if self.experts else 3 * (hidden + self.feed))),
            experts=self.experts,
            chosen=self.chosen,
            expert_parameters=self.layers * expert * self.experts,
        )


def _known(name: str, layers: int, hidden: int, heads: int, feed: int, matrices: int) -> ModelShape:
    """A shape with eight key-value heads of 128 dimensions, as all models of TYPICAL have."""
    vocabulary = 128256 if name.startswith("Llama") else 151936
    sizes = LayerSizes(layers, hidden, heads, 8, 128, feed, vocabulary, matrices)
    return sizes.shape(name, f"the shape of {name}, from its config.json")


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
        sides=near.sides // near.layers * layers,
        origin=f"{near.origin}, with {layers} layers",
    )


def shape_of_config(name: str, config: Any) -> ModelShape:
    """The shape of a model's configuration, counted on a module without weights. Raises ValueError
    for a mixture of experts whose experts are not counted."""
    import torch
    import transformers

    from rloo.config.file_checks import largest_of_layers
    from rloo.model.attention import head_size, num_kv_heads

    config = config.get_text_config()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    lookup = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2]
    # The experts of a layer are one tensor with three dimensions.
    expert_parameters = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    experts = _experts(config)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    if bool(expert_parameters) != bool(experts and chosen):
        raise ValueError(
            f"the model {name} is a mixture of experts, of which a plan of GPUs knows no costs in "
            "this version; give its active size (parameters)"
        )
    products = sum(p.numel() for p in matrices) - (0 if output is lookup else lookup.numel())
    return ModelShape(
        name=name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=largest_of_layers(config, "num_attention_heads"),
        kv_heads=num_kv_heads(config),
        head_dim=head_size(config),
        parameters=sum(p.numel() for p in model.parameters()),
        products=products + (expert_parameters * chosen // experts if experts else 0),
        vocabulary=config.vocab_size,
        origin="counted from its configuration",
        sides=sum(sum(p.shape) for p in matrices if p is not lookup and p is not output),
        experts=experts,
        chosen=chosen if experts else 0,
        expert_parameters=expert_parameters,
    )


def _experts(config: Any) -> int:
    """The number of experts in a layer; 0 for a model without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((n for name in names if (n := getattr(config, name, None))), 0)
