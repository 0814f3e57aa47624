"""Builds micro-batches from completions: token lists become tensors of inputs and targets, shifted
by one position. A micro-batch is packed (each prompt once, no padding in linear layers), or padded
if packing is not supported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rloo.data.image_processing import join_inputs
from rloo.model.attention import no_mask
from rloo.model.offload import send
from rloo.model.shared_prefix import PackedLayout, Span
from rloo.types import LEAVE_ONE_OUT, Sample

# The number of rows in one attention call. Rows are sorted by length, which leaves little padding.
ROWS_PER_CALL = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The inputs of a forward pass: T completion tokens of N completions, flat.

    `inputs` are keyword arguments of the model; `source_T` has the indices of the hidden states
    (batch and time flattened) that predict `target_T`. `group_N` has the group of each completion,
    numbered from 0 in this batch. `multiplicity` (in the shape of the input tokens) counts the
    completions that each input token belongs to. `weight_N` multiplies the loss of each completion
    (`Sample.weight`). `pilot_N` is true for completions of a pilot; None if there is no pilot.
    `coefficient_N2` has `Sample.coefficients`; None if all are those of leave-one-out.
    `all_scored`: whether no reward is missing, computed on the host (no device
    synchronization).
    """

    keys: list[tuple[int, int]]
    inputs: dict[str, Any]
    multiplicity: Tensor
    source_T: Tensor
    target_T: Tensor
    sequence_T: Tensor
    group_N: Tensor
    reward_N: Tensor
    weight_N: Tensor
    truncated_N: Tensor
    policy_T: Tensor
    behavior_T: Tensor
    lengths: list[int]
    all_scored: bool
    pilot_N: Tensor | None = None
    coefficient_N2: Tensor | None = None

    @property
    def size(self) -> int:
        """N, the number of completions."""
        return len(self.keys)


def split(
    samples: Sequence[Sample], max_tokens: int, *, whole_groups: bool, packed: bool = True
) -> list[list[Sample]]:
    """Divide samples into micro-batches of at most `max_tokens` input tokens. Padding counts,
    unless the micro-batches are `packed`. The result depends only on the arguments.

    With `whole_groups` no group is divided, and a group that exceeds the budget is a separate
    micro-batch. Otherwise a group may be divided at the budget, and its prompt is computed once in
    each part.
    """
    batches: list[list[Sample]] = []
    size = _Size()
    for group in _by_group(samples):
        for unit in _units(group, whole_groups):
            grown = size.with_more(unit)
            if batches and grown.tokens(packed) <= max_tokens:
                batches[-1].extend(unit)
                size = grown
            else:
                batches.append(list(unit))
                size = _Size().with_more(unit)
    return batches


def deal(
    samples: Sequence[Sample], processes: int, *, whole_groups: bool, packed: bool = True
) -> list[list[Sample]]:
    """Return the samples of each process, with about the same number of input tokens for each. Each
    process gets consecutive samples, so few groups are divided; with `whole_groups` no group is
    divided. The result depends only on the arguments. A single process gets all samples in
    order."""
    units = [unit for group in _by_group(samples) for unit in _units(group, whole_groups)]
    costs = [count_input_tokens(unit, packed) for unit in units]
    total, before = max(sum(costs), 1), 0.0
    dealt: list[list[Sample]] = [[] for _ in range(processes)]
    for unit, cost in zip(units, costs, strict=True):
        # The middle of the unit decides which process gets it.
        dealt[min(int((before + cost / 2) * processes / total), processes - 1)] += unit
        before += cost
    return dealt


def _units(group: list[Sample], whole: bool) -> list[list[Sample]]:
    return [group] if whole else [[sample] for sample in group]


def exceeds(samples: Sequence[Sample], max_tokens: int, *, packed: bool = True) -> bool:
    """Whether any group has more than `max_tokens` input tokens."""
    return any(count_input_tokens(group, packed) > max_tokens for group in _by_group(samples))


def make_sample(key: tuple[int, int], prompt_tokens: int, completion_tokens: int) -> Sample:
    """A sample with these lengths of prompt and completion. Its tokens are the first of the
    vocabulary, repeated."""
    prompt, completion = ([i % 64 for i in range(n)] for n in (prompt_tokens, completion_tokens))
    return Sample(
        key=key,
        place=0,
        prompt_ids=prompt,
        token_ids=completion,
        policy_logprobs=[0.0] * completion_tokens,
        reward=0.0,
        truncated=True,
    )


def shortened(sample: Sample, prompt_tokens: int, completion_tokens: int) -> Sample:
    """`sample` with at most the first tokens of its prompt and completion. `trained` is dropped:
    all tokens count."""
    few = slice(completion_tokens)
    return replace(
        sample,
        prompt_ids=sample.prompt_ids[:prompt_tokens],
        token_ids=sample.token_ids[few],
        policy_logprobs=sample.policy_logprobs[few],
        behavior_logprobs=None,
        trained=None,
        weight_versions=(),
    )


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """A packed micro-batch: one row with each prompt once, followed by its completions. Positions
    of each completion continue those of its prompt."""
    tokens: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    spans: list[Span] = []
    source: list[list[int]] = []
    for number, group in enumerate(_by_group(samples)):
        prompt = group[0].prompt_ids
        spans.append(Span(len(tokens), len(tokens) + len(prompt)))
        tokens += prompt
        last_of_prompt = len(tokens) - 1
        positions += range(len(prompt))
        counts += [len(group)] * len(prompt)
        for sample in group:
            # The last token is predicted but predicts nothing, so it is not an input.
            inner = sample.token_ids[:-1]
            start = len(tokens)
            spans.append(Span(start, start + len(inner), number))
            source.append([last_of_prompt, *range(start, start + len(inner))])
            tokens += inner
            positions += range(len(prompt), len(prompt) + len(inner))
            counts += [1] * len(inner)
    inputs = {
        "input_ids": send(torch.tensor([tokens]), device),
        "position_ids": send(torch.tensor([positions]), device),
        "attention_mask": no_mask(device),
        "rloo_layout": PackedLayout(spans, ROWS_PER_CALL, device),
    }
    multiplicity = send(torch.tensor([counts]), device)
    return _micro_batch(_in_order(samples), inputs, multiplicity, source, device)


def pad(samples: Sequence[Sample], device: torch.device, pad_token_id: int) -> MicroBatch:
    """A padded micro-batch: one row per completion with its prompt, padded on the right. A prompt's
    images are repeated for each of its rows."""
    ordered = _in_order(samples)
    rows = [[*s.prompt_ids, *s.token_ids[:-1]] for s in ordered]
    width = max(len(row) for row in rows)
    pixels = [(sample.key[0], sample.pixels) for sample in ordered]
    source = [
        list(range(number * width + len(sample.prompt_ids) - 1, number * width + len(row)))
        for number, (sample, row) in enumerate(zip(ordered, rows, strict=True))
    ]
    padded = [row + [pad_token_id] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    inputs = {
        "input_ids": send(torch.tensor(padded), device),
        "attention_mask": send(torch.tensor(mask), device),
        **join_inputs(pixels, [0] * len(rows), width, device),
    }
    return _micro_batch(ordered, inputs, inputs["attention_mask"], source, device)


def _micro_batch(
    ordered: Sequence[Sample],
    inputs: dict[str, Any],
    multiplicity: Tensor,
    source: list[list[int]],
    device: torch.device,
) -> MicroBatch:
    """Build a MicroBatch. Its token fields (`_T`) have only the tokens that are trained on."""

    def flat(values: Iterable[Sequence[T]]) -> list[T]:
        return [x for s, of_s in zip(ordered, values, strict=True) for x in s.of_trained(of_s)]

    numbers = {group: i for i, group in enumerate(dict.fromkeys(s.key[0] for s in ordered))}
    lengths = torch.tensor([s.num_trained for s in ordered])
    return MicroBatch(
        keys=[s.key for s in ordered],
        inputs=inputs,
        multiplicity=multiplicity,
        source_T=send(torch.tensor(flat(source)), device),
        target_T=send(torch.tensor(flat(s.token_ids for s in ordered)), device),
        sequence_T=send(torch.arange(len(ordered)).repeat_interleave(lengths), device),
        group_N=send(torch.tensor([numbers[s.key[0]] for s in ordered]), device),
        reward_N=send(torch.tensor([s.reward for s in ordered], dtype=torch.float64), device),
        weight_N=send(torch.tensor([s.weight for s in ordered], dtype=torch.float64), device),
        truncated_N=send(torch.tensor([s.truncated for s in ordered]), device),
        policy_T=send(torch.tensor(flat(s.policy_logprobs for s in ordered)), device),
        behavior_T=send(
            torch.tensor(flat(s.behavior_logprobs or s.policy_logprobs for s in ordered)), device
        ),
        lengths=lengths.tolist(),
        all_scored=not any(math.isnan(s.reward) for s in ordered),
        pilot_N=_sent(pilot_mask(ordered), device),
        coefficient_N2=_sent(coefficients_of(ordered), device),
    )


def _sent(values: Tensor | None, device: torch.device) -> Tensor | None:
    return None if values is None else send(values, device)


def pilot_mask(samples: Sequence[Sample]) -> Tensor | None:
    """Whether each completion belongs to a pilot, (N,); None if there is no pilot."""
    found = [sample.pilot for sample in samples]
    return torch.tensor(found) if any(found) else None


def coefficients_of(samples: Sequence[Sample]) -> Tensor | None:
    """The coefficients of each completion's baseline, (N, 2), float64; None if all are those of
    leave-one-out."""
    found = [sample.coefficients for sample in samples]
    if all(some == LEAVE_ONE_OUT for some in found):
        return None
    return torch.tensor(found, dtype=torch.float64)


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for group in _by_group(samples) for sample in group]


def _by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.key[0], []).append(sample)
    return list(groups.values())


def count_input_tokens(samples: Sequence[Sample], packed: bool) -> int:
    """The input tokens of `samples` as one micro-batch: if `packed`, each prompt counts once;
    otherwise padding counts."""
    size = _Size()
    for group in _by_group(samples):
        size = size.with_more(group)
    return size.tokens(packed)


class _Size(NamedTuple):
    """The size of a micro-batch: rows, tokens of the longest row, and `once`, the input tokens with
    each group's prompt counted once. Samples are added group by group."""

    rows: int = 0
    longest: int = 0
    once: int = 0
    last_group: int | None = None

    def with_more(self, samples: Sequence[Sample]) -> _Size:
        """The size after samples of one group are appended."""
        group = samples[0].key[0]
        prompt = 0 if group == self.last_group else len(samples[0].prompt_ids)
        longest = max(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
        return _Size(
            self.rows + len(samples),
            max(self.longest, longest),
            self.once + prompt + sum(len(s.token_ids) - 1 for s in samples),
            group,
        )

    def tokens(self, packed: bool) -> int:
        """The input tokens: see `count_input_tokens`."""
        return self.once if packed else self.rows * self.longest
