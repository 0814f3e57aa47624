"""Flash and memory-efficient attention of a GPU by their definition, in float32, as operations that
torch's dispatcher finds, with what the real ones refuse.

Rules are those of torch's `flash_api.cpp` (`mha_varlen_fwd`, `mha_varlen_bwd`) and `attention.cu`,
the same from 2.8 to 2.15 where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.gpu.device import Device

HALF = (torch.float16, torch.bfloat16)


class Kernels:
    """The attention of one device. `calls`: of each flash forward the number of segments, that of
    queries, the longest segment, and whether its queries were swapped with their heads."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[tuple[int, int, int, bool]] = []
        self._library: Any = None

    def install(self) -> None:
        """Have the dispatcher find them for tensors in the memory of a CPU."""
        self._library = torch.library.Library("aten", "IMPL")
        for name in (
            "_flash_attention_forward",
            "_flash_attention_backward",
            "_scaled_dot_product_efficient_attention",
        ):
            self._library.impl(name, getattr(self, name), "CPU")

    def remove(self) -> None:
        """Have it find none again."""
        self._library._destroy()

    def _need(self, holds: bool, text: str) -> None:
        if not holds:
            self._device.refuse(text)

    def _check_types(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        need = self._need
        half = query.dtype in HALF or self._device.exact
        need(half, "FlashAttention only support fp16 and bf16 data type")
        need(key.dtype == query.dtype, "query and key must have the same dtype")
        need(value.dtype == query.dtype, "query and value must have the same dtype")
        for tensor in (query, key, value):
            need(tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension")

    def _check_edges(self, edges_q: Tensor, edges_k: Tensor, used: Tensor | None) -> None:
        need = self._need
        for edges in (edges_q, edges_k):
            need(edges.dtype == torch.int32, "cu_seqlens must have dtype int32")
            need(edges.is_contiguous(), "cu_seqlens must be contiguous")
        batch = edges_q.numel() - 1
        need(batch > 0, "batch size must be positive")
        need(edges_k.numel() == batch + 1, "cu_seqlens_k must have shape (batch_size + 1)")
        if used is not None:
            need(used.dtype == torch.int32, "seqused_k must have dtype int32")
            shaped = used.is_contiguous() and used.numel() == batch
            need(shaped, "seqused_k must have shape (batch_size)")

    def _flash_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, edges_q: Tensor, edges_k: Tensor,
        most_q: int, most_k: int, dropout: float, causal: bool, debug: bool, *,
        scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None, seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need, (heads, size), heads_k = self._need, query.shape[1:], key.shape[1]
        need(seqused_k is None or dropout == 0.0, "dropout with seqused_k")
        self._check_types(query, key, value)
        self._check_edges(edges_q, edges_k, seqused_k)
        need(size <= 256, "FlashAttention forward only supports head dimension at most 256")
        need(size % 8 == 0, "query should have a head dimension divisible by 8")
        divides = heads % heads_k == 0
        need(divides, "Number of heads in key/value must divide number of heads in query")
        batch = edges_q.numel() - 1
        swapped = most_q == 1 and heads > heads_k and not dropout and size % 8 == 0
        self.calls.append((batch, len(query), most_q, swapped))
        if swapped:  # as the kernel does, which reads one query of each segment
            shape = [batch, heads_k, heads // heads_k, size]
            fits = len(query) == batch
            need(fits, f"shape '{shape}' is invalid for input of size {query.numel()}")
        parts = _Parts(edges_q, edges_k, seqused_k)
        longest = int(parts.valid_q.sum(1).max())
        need(longest <= most_q, f"a segment is longer than max_seqlen_q {most_q}")
        scores = parts.scores(query, key, causal, scale)
        of_keys = parts.of_keys(value, heads)
        found = torch.einsum("bhql,blhd->bqhd", scores.softmax(-1).nan_to_num(), of_keys)
        output = torch.full_like(query, torch.nan)
        normalizer = torch.full((heads, len(query)), torch.nan, dtype=scores.dtype)
        here = parts.index_q[parts.valid_q]
        output[here] = found[parts.valid_q].to(query.dtype)
        normalizer[:, here] = scores.logsumexp(-1).transpose(1, 2)[parts.valid_q].t()
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return output, normalizer, *state, torch.empty(0, dtype=query.dtype)

    def _flash_attention_backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor,
        normalizer: Tensor, edges_q: Tensor, edges_k: Tensor, most_q: int, most_k: int,
        dropout: float, causal: bool, state: Tensor, unused: Tensor, *,
        scale: float | None = None, window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need = self._need
        self._check_types(query, key, value)
        self._check_edges(edges_q, edges_k, None)
        for name, tensor in (("out", output), ("dout", gradient)):
            need(tensor.dtype == query.dtype, f"query and {name} must have the same dtype")
            need(tensor.stride(-1) == 1, f"{name} tensor must have contiguous last dimension")
        precise = torch.float64 if self._device.exact else torch.float32
        need(normalizer.dtype == precise, "softmax_lse must be float32")
        need(normalizer.shape == (query.shape[1], len(query)), "softmax_lse has another shape")
        need(normalizer.is_contiguous(), "softmax_lse must be contiguous")
        parts, heads = _Parts(edges_q, edges_k, None), query.shape[1]
        scores = parts.scores(query, key, causal, scale)
        rows = normalizer.t()[parts.index_q].transpose(1, 2)[..., None]
        seen = parts.valid_q[:, None, :, None]
        weights = torch.where(seen, (scores - rows).exp(), 0.0)
        keys, values = parts.of_keys(key, heads), parts.of_keys(value, heads)
        above, made, asked = (x[parts.index_q].to(scores.dtype) for x in (gradient, output, query))
        common = (above * made).sum(-1).transpose(1, 2)[..., None]
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        inner = weights * (torch.einsum("bqhd,blhd->bhql", above, values) - common) * factor
        groups = heads // key.shape[1]
        of_query = torch.einsum("bhql,blhd->bqhd", inner, keys)
        of_key = torch.einsum("bhql,bqhd->blhd", inner, asked)
        of_value = torch.einsum("bhql,bqhd->blhd", weights, above)
        places = (parts.index_q, parts.valid_q), *((parts.index_k, parts.valid_k),) * 2
        found = []
        for given, part, (index, valid) in zip(
            (query, key, value), (of_query, of_key, of_value), places, strict=True
        ):
            shared = part if given is query else part.unflatten(2, (-1, groups)).sum(3)
            whole = torch.zeros(given.shape, dtype=scores.dtype)
            found.append(whole.index_add_(0, index[valid], shared[valid]).to(query.dtype))
        return tuple(found)

    def _scaled_dot_product_efficient_attention(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, normalizes: bool,
        dropout: float = 0.0, causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        need = self._need
        need(query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1], "heads differ")
        need(query.dtype == key.dtype == value.dtype, "dtypes differ")
        for tensor in (query, key, value):
            need(tensor.stride(-1) == 1, "the last dimension must be contiguous")
        if bias is not None:
            need(bias.dtype == query.dtype, f"invalid dtype for bias: {bias.dtype}")
            need(bias.shape == (*query.shape[:3], key.shape[2]), "invalid shape for attention bias")
            need(bias.stride(-1) == 1, "attn_bias: wrong alignment")
            rows = zip(bias.shape[:3], bias.stride()[:3], strict=True)
            wanted = 16 // bias.element_size()  # bytes that are read at a time
            aligned = all(size == 1 or stride % wanted == 0 for size, stride in rows)
            need(aligned, "attn_bias is not correctly aligned")
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * factor
        scores = scores if bias is None else scores + bias.to(wide)
        output = (scores.softmax(-1) @ value.to(wide)).to(query.dtype)
        # The kernel has room for whole blocks of 32 queries.
        queries = query.shape[2]
        normalizer = torch.nn.functional.pad(
            scores.logsumexp(-1), (0, -queries % 32), value=torch.inf
        )
        # The layout of the output is that of (batch, queries, heads, size).
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        state = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        return output, normalizer, *state


class _Parts:
    """Segments in rows: which query and key stand where, (B, Q) and (B, L), if any does."""

    def __init__(self, edges_q: Tensor, edges_k: Tensor, used: Tensor | None) -> None:
        self.index_q, self.valid_q = self._rows(edges_q[:-1], edges_q.diff())
        lengths = edges_k.diff() if used is None else used
        self.index_k, self.valid_k = self._rows(edges_k[:-1], lengths)

    @staticmethod
    def _rows(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.arange(int(lengths.max()))
        valid = columns < lengths[:, None]
        return torch.where(valid, starts[:, None] + columns, 0), valid

    def of_keys(self, states: Tensor, heads: int) -> Tensor:
        """Keys or values (B, L, H, D), at least float32."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        return wide.repeat_interleave(heads // states.shape[1], 1)[self.index_k]

    def scores(self, query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
        """(B, H, Q, L); the causal mask is aligned to the last key."""
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        keys = self.of_keys(key, query.shape[1])
        queries = query[self.index_q].to(keys.dtype)
        scores = torch.einsum("bqhd,blhd->bhql", queries, keys) * factor
        visible = self.valid_k[:, None, None]
        if causal:
            later = (self.valid_k.sum(1) - self.valid_q.sum(1))[:, None, None, None]
            rows, columns = (torch.arange(n) for n in scores.shape[2:])
            visible = visible & (columns <= rows[:, None] + later)
        return scores.masked_fill(~visible, -torch.inf)
