"""The decoder's arithmetic in a few large operations per layer, on weights laid out for sampling.

When a transformers module computes one token per row, the overhead between operations takes longer
than the operations. This decoder computes the same with fewer operations, for the architectures
named here. Queries, keys and values come from one matrix, and both halves of the gated layer from
another. Norm weights are multiplied into the next matrix. Rotary embeddings are complex products.
`support.py` compares the decoder with the module before its first use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from rloo.distributed.sharded_tensor import full_tensor, shape_of
from rloo.engines.in_process import layer_windows
from rloo.engines.native.weight_layout import LinearOp, make_linear_op
from rloo.kernels import gpu_kernels
from rloo.kernels.decode import CDecoder, DecoderSizes, PackedMatrix
from rloo.model.attention import AttentionOptions, head_size

# These architectures have RMSNorm before attention and before a gated SiLU layer, and only rotary
# positions.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
# Rotary frequencies that do not depend on the length of the sequence.
_STATIC_ROTARY = ("default", "linear", "llama3", "yarn")


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` supports the model's configuration. A trial must confirm the
    support."""
    config = model.config.get_text_config()
    if config.model_type not in ARCHITECTURES or config.hidden_act != "silu":
        return False
    # The attribute is absent at the top level of a model that reads images.
    rotary = getattr(model.base_model, "rotary_emb", None)
    return getattr(rotary, "rope_type", None) in _STATIC_ROTARY


@dataclass(frozen=True, slots=True)
class _Layer:
    """The matrices of a layer: `qkv` computes queries, keys and values, `gate_up` both halves of
    the gated layer."""

    qkv: LinearOp
    qk_norm: Tensor | None
    out: LinearOp
    gate_up: LinearOp
    down: LinearOp
    options: AttentionOptions


def _layer_number(item: tuple[str, Tensor]) -> int | None:
    found = re.match(r"(?:model\.)?layers\.(\d+)\.", item[0])
    return int(found[1]) if found else None


class AttentionCache(Protocol):
    """Stores keys and values, and attends to them."""

    def get_seq_length(self) -> int:
        """The largest possible number of positions before the tokens of a forward pass."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> object:
        """Store keys and values (B, H_kv, Q, D)."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Map query (B, H, Q, D) to the output (B, Q, H, D)."""


class FusedDecoder:
    """A forward pass of the architecture of `model`. Matrix products have the type `dtype`. All
    other operations, the residual stream and the caches have at least float32. Call `load`
    first."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        config = model.config.get_text_config()
        self._model = model
        self._dtype = dtype
        self._precise = torch.promote_types(model.dtype, torch.float32)
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._size: int = head_size(config)
        self._epsilon: float = config.rms_norm_eps
        self._width: int = config.hidden_size
        self._floors = {
            size: torch.tensor(
                (size * self._epsilon) ** 0.5, dtype=self._precise, device=model.device
            )
            for size in (self._size, self._width)
        }
        self._layers: list[_Layer] = []
        self._rotations = torch.empty(0, 0)
        # The engine sets `compiles` if keys and values are rounded to the products' dtype.
        self.compiles = False

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Use these weights, named as in the model. Matrices for C and oneDNN are copied. Other
        matrices that the decoder uses unchanged are not copied, and must not change until the next
        load. Sharded weights are gathered one at a time. Raises KeyError for a missing weight."""
        self._layers = []
        windows = layer_windows(self._model)
        others: dict[str, Tensor] = {}
        layers: dict[int, _Layer] = {}
        # One layer at a time: its merged weights are freed before the next layer is merged.
        for number, part in groupby(weights, key=_layer_number):
            start = f"layers.{number}."
            named = {
                name.removeprefix("model.").removeprefix(start): weight for name, weight in part
            }
            if number is None:
                others |= named
            else:
                options = AttentionOptions(scaling=1.0, sliding_window=windows[number])
                layers[number] = self._fuse(named, options)
            del named
        self._layers = [layers[number] for number in range(len(windows))]
        self._embedding = full_tensor(others["embed_tokens.weight"])
        self._norm = full_tensor(others["norm.weight"]).to(self._precise) * self._width**0.5
        head = others.get("lm_head.weight")
        self._head = self._matrix(self._embedding if head is None else full_tensor(head), None)

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a sliding window."""
        return any(window is not None for window in layer_windows(self._model))

    @property
    def head_size(self) -> int:
        """The size of a query, key or value of one head."""
        return self._size

    def hidden_bytes(self) -> int:
        """Bytes of the matrices that torch's allocation statistics do not count."""
        layers = [m for x in self._layers for m in (x.qkv, x.out, x.gate_up, x.down)]
        return sum(matrix.hidden_bytes for matrix in (*layers, self._head))

    def in_c(self) -> CDecoder | None:
        """The decoder for sampling in C; None if a matrix is not packed in panels, or a layer has a
        sliding window."""
        layers = []
        for layer in self._layers:
            factors = (layer.qkv, layer.out, layer.gate_up, layer.down)
            panels = [factor for factor in factors if isinstance(factor, PackedMatrix)]
            if len(panels) < len(factors) or layer.options.sliding_window is not None:
                return None
            qkv, out, gate_up, down = panels
            layers.append((qkv, out, gate_up, down, layer.qk_norm))
        if not isinstance(self._head, PackedMatrix) or self._embedding.dtype != torch.float32:
            return None
        sizes = DecoderSizes(
            hidden=self._width,
            heads=self._heads,
            key_heads=self._kv_heads,
            size=self._size,
            inner=layers[0][3].depth,
            vocabulary=self._head.size,
            hidden_floor=self._width * self._epsilon,
            size_floor=self._size * self._epsilon,
        )
        return CDecoder(sizes, layers, (self._embedding, self._norm, self._head))

    def _matrix(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> LinearOp:
        return make_linear_op(weight.to(self._dtype), bias, self._precise, gated=gated)

    def _fuse(self, named: Mapping[str, Tensor], options: AttentionOptions) -> _Layer:
        scaling = self._size**-0.5
        qk_norm = None
        if "self_attn.q_norm.weight" in named:
            # A norm would undo a scaling before it, so the scaling is part of the norm's weight.
            norms = (
                full_tensor(named[f"self_attn.{name}_norm.weight"]).to(self._precise)
                for name in "qk"
            )
            query, key = (self._interleave(x) * self._size**0.5 for x in norms)
            query, key = (query * scaling).expand(self._heads, -1), key.expand(self._kv_heads, -1)
            qk_norm, scaling = torch.cat([query, key]), 1.0

        turns: Mapping[str, Callable[[Tensor], Tensor]] = {
            "self_attn.q_proj": lambda rows: self._interleave(rows) * scaling,
            "self_attn.k_proj": self._interleave,
        }

        def rows_of(name: str, kind: str) -> Tensor:
            rows = full_tensor(named[f"{name}.{kind}"]).to(self._precise)
            return turns[name](rows) if name in turns else rows

        def join(norm: str, *names: str) -> Tensor:
            """Stack matrices, each multiplied by the weight of the norm before it."""
            sizes = [shape_of(named[f"{name}.weight"])[0] for name in names]
            factor = full_tensor(named[f"{norm}_layernorm.weight"]) * self._width**0.5
            joined = factor.new_empty(sum(sizes), self._width, dtype=self._dtype)
            for name, place in zip(names, joined.split(sizes), strict=True):
                place.copy_(rows_of(name, "weight") * factor)
            return joined

        def bias(*names: str) -> Tensor | None:
            if f"{names[0]}.bias" not in named:
                return None
            return torch.cat([rows_of(name, "bias") for name in names])

        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        gate_up = ["mlp.gate_proj", "mlp.up_proj"]
        return _Layer(
            qkv=self._matrix(join("input", *qkv), bias(*qkv)),
            qk_norm=qk_norm,
            out=self._matrix(
                full_tensor(named["self_attn.o_proj.weight"]), bias("self_attn.o_proj")
            ),
            gate_up=self._matrix(join("post_attention", *gate_up), bias(*gate_up), gated=True),
            down=self._matrix(full_tensor(named["mlp.down_proj.weight"]), bias("mlp.down_proj")),
            options=options,
        )

    def _interleave(self, rows: Tensor) -> Tensor:
        """Reorder the rows of heads so that the two values that rotary embedding rotates together
        are neighbours. Queries and keys are reordered in the same way, so their products do not
        change."""
        heads = rows.view(-1, 2, self._size // 2, *rows.shape[1:])
        return heads.transpose(1, 2).reshape(rows.shape)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        cache: AttentionCache,
        ends: Tensor | None = None,
    ) -> Tensor:
        """The logits (B, V) after the last token, from input_ids and positions, int64 (B, Q). With
        `ends` (P,), which requires a single row (B = 1), the result is the logits (P, V) after the
        tokens at these indices."""
        with torch.autocast(input_ids.device.type, enabled=False):
            batch, length = input_ids.shape
            hidden = F.embedding(input_ids.flatten(), self._embedding).to(self._precise)
            rotations = self._rotate_by(positions, cache.get_seq_length() + length)
            compiles = self.compiles and gpu_kernels.computes(hidden)
            before, after = self._before, self._after
            if compiles:
                before, after = map(gpu_kernels.compiled, (before, after))
                rotations = torch.view_as_real(rotations)
                gpu_kernels.let_vary(hidden, rotations)
            for number, layer in enumerate(self._layers):
                parts = before(layer, hidden, rotations)
                query, key, value = (
                    x.view(batch, length, -1, self._size).transpose(1, 2) for x in parts
                )
                cache.update(key, value, number)
                states = cache.attend(query, key, value, layer.options).flatten(0, 1).flatten(1)
                if compiles:
                    gpu_kernels.let_vary(hidden, states)
                hidden = after(layer, hidden, states)
            last = hidden.view(batch, length, -1)[:, -1] if ends is None else hidden[ends]
            return self._head.times(self._normalize(last) * self._norm)

    def _before(
        self, layer: _Layer, hidden: Tensor, rotations: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, heads, size) of hidden (T, D)."""
        turned = self._heads + self._kv_heads
        states = layer.qkv.times(self._normalize(hidden)).contiguous()
        states = states.view(len(hidden), -1, self._size)
        if layer.qk_norm is not None:
            qk = self._normalize(states[:, :turned]) * layer.qk_norm
        else:
            qk = states[:, :turned].contiguous()
        value = states[:, turned:]
        if rotations.is_complex():
            torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotations)
        else:  # the same with operations that torch.compile supports
            one, other = qk.unflatten(-1, (-1, 2)).unbind(-1)
            cosine, sine = rotations.unbind(-1)
            pairs = one * cosine - other * sine, one * sine + other * cosine
            qk, value = torch.stack(pairs, -1).flatten(-2).to(self._dtype), value.to(self._dtype)
        return qk[:, : self._heads], qk[:, self._heads :], value

    def _after(self, layer: _Layer, hidden: Tensor, states: Tensor) -> Tensor:
        """Complete a layer after attention: `states` is the output of attention, and `hidden` (T,
        D) the residual stream."""
        hidden = layer.out.added(hidden, states)
        states = layer.gate_up.gated(self._normalize(hidden))
        return layer.down.added(hidden, states)

    def _normalize(self, states: Tensor) -> Tensor:
        """RMSNorm without its weight and without the square root of the size, which are part of the
        next matrix: x / sqrt(sum of squares + size * epsilon)."""
        floor = self._floors[states.shape[-1]]
        return states / torch.linalg.vector_norm(states, dim=-1, keepdim=True).hypot_(floor)

    def _rotate_by(self, positions: Tensor, limit: int) -> Tensor:
        """Rotations, complex (B * Q, 1, head size / 2), for positions below `limit`."""
        return self.rotations(limit)[positions.flatten(), None]

    def rotations(self, limit: int) -> Tensor:
        """The table of rotations, complex (L, head size / 2), of at least `limit` positions."""
        if len(self._rotations) < limit:
            table = torch.arange(2 * limit, device=self._embedding.device)[None]
            like = torch.empty(0, dtype=self._precise, device=table.device)
            # `forward` is called directly, since DeepSpeed's hooks count calls of the module, and a
            # process with longer prompts would make more calls.
            rotary: Any = self._model.base_model.rotary_emb
            halves = (x[0, :, : self._size // 2].contiguous() for x in rotary.forward(like, table))
            self._rotations = torch.complex(*halves)
        return self._rotations
