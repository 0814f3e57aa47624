"""Sequence parallelism: the ranks of a group each compute a slice of the tokens of a packed row.

All modules except attention treat every token by itself, so a rank runs them on its slice.
Attention exchanges heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509): one all-to-all gives a
rank all tokens for its part of the heads, and another one returns to slices. The log-probs of all
slices are then gathered, so that every rank of the group computes the loss of the whole
micro-batch. In the backward a rank only follows the log-probs of its slice. The sum of the
gradients over all ranks is therefore the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from rloo.config.file_checks import largest_of_layers
from rloo.distributed.group_setup import SequenceGroup
from rloo.model.attention import AttentionLayout, AttentionOptions
from rloo.model.forward import LogprobModel
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch, make_sample, pack
from rloo.model.prepare_model import rounding_of

# Kinds of rotary embedding whose frequencies depend on the largest position of a forward.
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class _AllToAll(torch.autograd.Function):
    """Sends block j of (size, N) to rank j of the group, and receives one block of each rank. The
    gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.all_to_all(blocks.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.group.all_to_all(gradients[0].contiguous()), None


class _AllGather(torch.autograd.Function):
    """The values of all ranks of the group, (size, ...). A rank's gradient is that of its own
    values: every rank computes the same loss from the result, and the loss counts once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: SequenceGroup) -> Tensor:
        ctx.rank = group.rank
        return group.all_gather(values.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][ctx.rank], None


class SlicedLayout:
    """The attention of this rank's slice of a packed row with `num_tokens` tokens. `row` is the
    layout of the row."""

    def __init__(self, row: AttentionLayout, num_tokens: int, group: SequenceGroup) -> None:
        self._row = row
        self._num_tokens = num_tokens
        self._group = group

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attention of a slice: query (1, H, t, D), key and value (1, H_kv, t, D) to
        (1, t, H, D)."""
        size = self._group.size
        if query.shape[1] % size:  # in a layer with fewer heads than others
            raise ValueError(_uneven_heads(query.shape[1], size))
        repeats = kv_repeats(query.shape[1], key.shape[1], size)
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = self._to_heads(query, key, value)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.view(size, -1)[self._group.rank])
        output = self._row.attend(query, key, value, options)
        return self._to_tokens(output)

    def _to_heads(self, *states: Tensor) -> Iterator[Tensor]:
        """From all heads of a slice, (1, H, t, D) each, to this rank's heads of the row,
        (1, H / size, T, D)."""
        size, device = self._group.size, states[0].device.type
        dtypes = [x.dtype for x in states]
        if device == "cuda" and torch.is_autocast_enabled(device):
            # The kernels compute in this dtype.
            dtypes = [torch.get_autocast_dtype(device)] * len(states)
        blocks = [
            x[0].to(dtype).unflatten(0, (size, -1)) for x, dtype in zip(states, dtypes, strict=True)
        ]
        # One exchange for all: a collective has the dtype that holds all of them.
        sent = torch.cat([block.flatten(1) for block in blocks], dim=1)
        received = _AllToAll.apply(sent, self._group)
        parts = received.split([block[0].numel() for block in blocks], dim=1)
        for part, block, dtype in zip(parts, blocks, dtypes, strict=True):
            heads = part.unflatten(1, block.shape[1:]).transpose(0, 1).flatten(1, 2)
            yield heads[None, :, : self._num_tokens].to(dtype)

    def _to_tokens(self, output: Tensor) -> Tensor:
        """From this rank's heads of the row, (1, T, H / size, D), to all heads of its slice,
        (1, t, H, D)."""
        size = self._group.size
        length = slice_length(self._num_tokens, size)
        padded = F.pad(output[0], (0, 0, 0, 0, 0, size * length - self._num_tokens))
        blocks = padded.unflatten(0, (size, length))
        received = _AllToAll.apply(blocks.flatten(1), self._group).view(blocks.shape)
        return received.transpose(0, 1).flatten(1, 2)[None]


class SequenceParallel:
    """Computes the log-probs of micro-batches together with the other ranks of a group. All ranks
    of the group call every method with the same micro-batch."""

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group

    def scores(
        self, compute: Callable[[MicroBatch], TokenScores], batch: MicroBatch
    ) -> TokenScores:
        """The result of `compute` for the micro-batch. `compute` gets this rank's slice."""
        part = self._slice(batch)
        found = compute(part.batch)
        # Separately: the entropy has no gradient in most runs, and its backward is then left out.
        logprobs, entropy = (self._gather(x, part) for x in (found.logprobs, found.entropy))
        names = ("reference", "collision", "kl")
        given = {name: x for name in names if (x := getattr(found, name)) is not None}
        others = {name: self._gather(x, part) for name, x in given.items()}
        return TokenScores(logprobs, entropy, None, **others)

    def logprobs(self, compute: Callable[[MicroBatch], Tensor], batch: MicroBatch) -> Tensor:
        """As `scores`, for log-probs alone."""
        part = self._slice(batch)
        return self._gather(compute(part.batch), part)

    def check(self, scorer: LogprobModel, device: torch.device) -> None:
        """Compare the log-probs of a few tokens with those that this rank computes alone. Raises
        ValueError if they differ, or if the model cannot be divided in this way."""
        model = scorer.model
        _refuse(model, self.group.size)
        batch = pack([make_sample((n // 2, n), 2 + n, 2 + n) for n in range(4)], device)
        alone = scorer.logprobs(batch)
        found = (self.logprobs(scorer.logprobs, batch) - alone).abs().max().item()
        if not found <= rounding_of(model):
            raise ValueError(
                f"sp_size is {self.group.size} and {type(model).__name__} relates tokens to each "
                f"other outside of its attention: log-probs of slices differ by {found:.1e} "
                "(sp_size)"
            )

    def _slice(self, batch: MicroBatch) -> _Slice:
        group, tokens = self.group, batch.inputs["input_ids"].shape[1]
        length = slice_length(tokens, group.size)
        first = group.rank * length

        def cut(row: Tensor) -> Tensor:
            padded = F.pad(row, (0, group.size * length - tokens))
            return padded[:, first : first + length]

        owner = batch.source_T // length
        counts = owner.bincount(minlength=group.size)
        number, most = torch.stack([counts[group.rank], counts.max()]).tolist()
        order = owner.argsort(stable=True)
        sorted_owner = owner[order]
        begin = (counts.cumsum(0) - counts)[sorted_owner]
        among = torch.arange(len(order), device=order.device) - begin
        place = torch.empty_like(order).index_copy_(0, order, sorted_owner * most + among)
        mine = order[sorted_owner == group.rank]
        source, target = batch.source_T[mine] - first, batch.target_T[mine]
        if not number:  # one log-prob that nobody reads, since all ranks must use all weights
            source = target = order.new_zeros(1)
        inputs = {
            **batch.inputs,
            **{name: cut(batch.inputs[name]) for name in ("input_ids", "position_ids")},
            "rloo_layout": SlicedLayout(batch.inputs["rloo_layout"], tokens, group),
        }
        return _Slice(
            replace(
                batch,
                inputs=inputs,
                multiplicity=cut(batch.multiplicity),
                source_T=source,
                target_T=target,
            ),
            place,
            most,
        )

    def _gather(self, values: Tensor, part: _Slice) -> Tensor:
        """The values (T,) of all log-probs, from those of this rank's slice."""
        padded = F.pad(values, (0, part.most - len(values)))
        gathered = _AllGather.apply(padded, self.group)
        return gathered.flatten().index_select(0, part.place)


class _Slice(NamedTuple):
    """This rank's slice of a micro-batch. The slices of all ranks have at most `most` log-probs.
    Each is padded to this number, and `place` (T,) are the log-probs of the row among them."""

    batch: MicroBatch
    place: Tensor
    most: int


def slice_length(num_tokens: int, size: int) -> int:
    """The number of tokens of a slice. The last slices of a row are padded."""
    return -(-num_tokens // size)


def kv_repeats(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head is repeated, so that every rank has those of its query heads.
    `size` divides the number of query heads."""
    return next(
        n for n in range(1, heads + 1) if (heads // kv_heads) % n == 0 and kv_heads * n % size == 0
    )


def _refuse(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError for a model whose rows cannot be divided among `size` ranks."""
    config, name = model.config.get_text_config(), type(model).__name__
    heads = largest_of_layers(config, "num_attention_heads") or 1
    if heads % size:
        raise ValueError(_uneven_heads(heads, size))
    kinds = _rope_kinds(getattr(config, "rope_parameters", None))
    if found := sorted(kinds & set(_ROPE_BY_LENGTH)):
        raise ValueError(
            f"sp_size is {size} and {name} has positions of type {found[0]}, which depend on the "
            "longest row of a forward; slices have other lengths (sp_size)"
        )


def _uneven_heads(heads: int, size: int) -> str:
    return (
        f"sp_size is {size} and the model has {heads} attention heads, which {size} processes "
        "cannot share evenly; it must divide the number of heads (sp_size)"
    )


def _rope_kinds(parameters: Any) -> set[str]:
    """The types of rotary embedding in a configuration, which may have one for each type of
    layer."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {parameters.get("rope_type") or parameters.get("type")}
    return {k for k in kinds if k}.union(*map(_rope_kinds, parameters.values()))
