"""The minimum work of a step: operations and bytes, counted from lengths and shapes.

Operations (Kaplan et al. 2020, section 2.1): 2N for each prompt token (once per group) and for each
sampled token, 6N for each trained token (4N if the matrices are frozen, as with LoRA), 2N for each
token that the reference scores. N is the number of parameters of all matrices, with the output head
and without the embedding look-up. Attention adds 4 x (heads x head size) x layers for every pair of
a token and a token that it attends to. Trained and reference tokens are completion tokens. The
passes of the prompt through the update and the reference are counted separately, as
`prompt_passes`. This module has no times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder on which the counts depend. `queries` and `keys` are heads x head
    size."""

    num_layers: int
    hidden: int
    queries: int
    keys: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape in a model's config.json."""
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            queries=heads * head_dim,
            keys=config["num_key_value_heads"] * head_dim,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
        )

    @property
    def num_parameters(self) -> int:
        """N: the number of parameters in the matrices of the layers and the head."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.num_layers * layer + self.hidden * self.vocabulary

    @property
    def operations_per_pair(self) -> int:
        """Operations of attention (forward) per pair of tokens, products and sums counted."""
        return 4 * self.queries * self.num_layers

    @property
    def cache_numbers_per_token(self) -> int:
        """Numbers of keys and values in the cache per token."""
        return 2 * self.keys * self.num_layers


@dataclass(frozen=True)
class Floor:
    """Operations of a rollout and its updates, and bytes that decoding reads from the cache."""

    sample: int
    update: int
    prompt_passes: int
    cache_bytes: int

    @property
    def operations(self) -> int:
        return self.sample + self.update


def count_floor(
    shape: Shape,
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    *,
    iterations: int = 1,
    reference: bool = True,
    frozen: bool = False,
    cache_number_bytes: int = 4,
) -> Floor:
    """The floor of a rollout. `prompts` are lengths in tokens, `completions` the lengths of each
    prompt's completions. In a decoding step, the keys of a prompt are read once for its group."""
    num_parameters, per_pair = shape.num_parameters, shape.operations_per_pair
    prompt_tokens = sum(prompts)
    prompt_pairs = sum(_triangle(length) for length in prompts)
    sampled = sum(map(sum, completions))
    pairs = cache_tokens = 0
    for prompt, lengths in zip(prompts, completions, strict=True):
        own = sum(map(_triangle, lengths))
        pairs += prompt * sum(lengths) + own
        cache_tokens += prompt * max(lengths) + own
    # Forward counts 1, backward 2; for frozen matrices, backward counts 1. Attention has no
    # matrices.
    passes = iterations * (2 if frozen else 3) + reference
    attention_passes = iterations * 3 + reference
    return Floor(
        sample=2 * num_parameters * (prompt_tokens + sampled) + per_pair * (prompt_pairs + pairs),
        update=2 * num_parameters * passes * sampled + per_pair * attention_passes * pairs,
        prompt_passes=2 * num_parameters * passes * prompt_tokens
        + per_pair * attention_passes * prompt_pairs,
        cache_bytes=cache_number_bytes * shape.cache_numbers_per_token * cache_tokens,
    )


def count_decode_bytes(shape: Shape, floor: Floor, num_steps: int, number_bytes: int) -> int:
    """The minimum bytes that `num_steps` decoding steps read: all weights in each, and the
    cache."""
    return num_steps * shape.num_parameters * number_bytes + floor.cache_bytes


def _triangle(length: int) -> int:
    return length * (length + 1) // 2
