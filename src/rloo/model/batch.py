"""Completions to micro-batches: token lists become tensors, shifted by one.

A micro-batch is packed (every prompt once, no padding in the linear layers) or padded (the plain
form, for models that cannot be packed). Knows nothing of models, losses or rewards beyond carrying
each completion's numbers along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloo.data.pixels import join_inputs
from rloo.model.attention import no_mask
from rloo.model.shared_prefix import PackedLayout, Span
from rloo.types import Sample

# Rows of one attention call: sorted by length, so that a short answer is not padded to the longest.
ROWS_PER_CALL = 16


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass needs. T completion tokens of N completions, flat (see objective.py).

    `inputs` are keyword arguments of the model; `source_T` says which of its hidden states (batch
    and time flattened) predicts `target_T`. `group_N` numbers the groups of this batch from 0.
    `multiplicity` has the shape of the input tokens: to how many of the completions each belongs.
    """

    keys: list[tuple[int, int]]
    inputs: dict[str, Any]
    multiplicity: Tensor
    source_T: Tensor
    target_T: Tensor
    sequence_T: Tensor
    group_N: Tensor
    reward_N: Tensor
    truncated_N: Tensor
    engine_T: Tensor
    sampler_T: Tensor
    lengths: list[int]

    @property
    def num_input_tokens(self) -> int:
        """Tokens that the forward pass computes, padding included."""
        return int(self.inputs["input_ids"].numel())

    @property
    def size(self) -> int:
        return len(self.keys)


def split(
    samples: Sequence[Sample], max_tokens: int, *, whole_groups: bool, packed: bool = True
) -> list[list[Sample]]:
    """Micro-batches of at most `max_tokens` input tokens, padding included where they will not be
    `packed`: a pure function of its arguments.

    Groups stay whole if `whole_groups`; one that alone exceeds the budget is a micro-batch of its
    own (`exceeds` tells beforehand). Otherwise a group is cut where the budget ends, and its prompt
    computed once in each part.
    """
    batches: list[list[Sample]] = []
    for group in _by_group(samples):
        for unit in [group] if whole_groups else [[sample] for sample in group]:
            if batches and _cost([*batches[-1], *unit], packed) <= max_tokens:
                batches[-1].extend(unit)
            else:
                batches.append(list(unit))
    return batches


def exceeds(samples: Sequence[Sample], max_tokens: int, *, packed: bool = True) -> bool:
    """Whether some group alone is larger than the budget."""
    return any(_cost(group, packed) > max_tokens for group in _by_group(samples))


def pack(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """One row: each prompt once, followed by its completions; position numbers restart."""
    tokens: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    spans: list[Span] = []
    source: list[int] = []
    for number, group in enumerate(_by_group(samples)):
        prompt = group[0].prompt_ids
        spans.append(Span(len(tokens), len(tokens) + len(prompt)))
        tokens += prompt
        last_of_prompt = len(tokens) - 1
        positions += range(len(prompt))
        counts += [len(group)] * len(prompt)
        for sample in group:
            # The last token is predicted but predicts nothing, so it is no input.
            inner = sample.token_ids[:-1]
            start = len(tokens)
            spans.append(Span(start, start + len(inner), number))
            source += [last_of_prompt, *range(start, start + len(inner))]
            tokens += inner
            positions += range(len(prompt), len(prompt) + len(inner))
            counts += [1] * len(inner)
    inputs = {
        "input_ids": torch.tensor([tokens], device=device),
        "position_ids": torch.tensor([positions], device=device),
        "attention_mask": no_mask(device),
        "rloo_layout": PackedLayout(spans, ROWS_PER_CALL, device),
    }
    multiplicity = torch.tensor([counts], device=device)
    return _micro_batch(_in_order(samples), inputs, multiplicity, source, device)


def pad(samples: Sequence[Sample], device: torch.device, pad_token_id: int) -> MicroBatch:
    """One row a completion, prompt and all, padded on the right to the longest. A prompt's images
    go with each of its rows."""
    ordered = _in_order(samples)
    rows = [s.prompt_ids + s.token_ids[:-1] for s in ordered]
    width = max(len(row) for row in rows)
    source: list[int] = []
    for number, (sample, row) in enumerate(zip(ordered, rows, strict=True)):
        source += range(number * width + len(sample.prompt_ids) - 1, number * width + len(row))
    inputs = {
        "input_ids": torch.tensor(
            [row + [pad_token_id] * (width - len(row)) for row in rows], device=device
        ),
        "attention_mask": torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device
        ),
        **join_inputs(_pixels(ordered), [0] * len(rows), width, device),
    }
    return _micro_batch(ordered, inputs, inputs["attention_mask"], source, device)


def _micro_batch(
    ordered: Sequence[Sample],
    inputs: dict[str, Any],
    multiplicity: Tensor,
    source: list[int],
    device: torch.device,
) -> MicroBatch:
    numbers = {group: i for i, group in enumerate(dict.fromkeys(s.key[0] for s in ordered))}
    lengths = torch.tensor([len(s.token_ids) for s in ordered])
    return MicroBatch(
        keys=[s.key for s in ordered],
        inputs=inputs,
        multiplicity=multiplicity,
        source_T=torch.tensor(source, device=device),
        target_T=torch.tensor([t for s in ordered for t in s.token_ids], device=device),
        sequence_T=torch.arange(len(ordered)).repeat_interleave(lengths).to(device),
        group_N=torch.tensor([numbers[s.key[0]] for s in ordered], device=device),
        reward_N=torch.tensor([s.reward for s in ordered], dtype=torch.float64).to(device),
        truncated_N=torch.tensor([s.truncated for s in ordered], device=device),
        engine_T=torch.tensor([x for s in ordered for x in s.engine_logprobs], device=device),
        sampler_T=torch.tensor(
            [x for s in ordered for x in s.sampling_logprobs or s.engine_logprobs], device=device
        ),
        lengths=lengths.tolist(),
    )


def _pixels(ordered: Sequence[Sample]) -> list[dict[str, Any] | None]:
    """Of each sample, made once a prompt."""
    made = {group[0].key[0]: group[0].pixels for group in _by_group(ordered)}
    inputs = {number: make and make() for number, make in made.items()}
    return [inputs[s.key[0]] for s in ordered]


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for group in _by_group(samples) for sample in group]


def _by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.key[0], []).append(sample)
    return list(groups.values())


def _cost(samples: Sequence[Sample], packed: bool) -> int:
    """Input tokens of a micro-batch: each prompt once, or all rows as long as the longest."""
    if not packed:
        return len(samples) * max(len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples)
    prompts = sum(len(group[0].prompt_ids) for group in _by_group(samples))
    return prompts + sum(len(s.token_ids) - 1 for s in samples)
