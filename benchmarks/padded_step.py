"""A plain padded RLOO update in few lines: the computation of TRL 1.16 without TRL.

Prompts are padded on the left and completions on the right. Every row has a copy of its prompt.
There is one pass for the old log-probs, one for the reference and one for the loss. As in TRL,
log-probs are computed only for completion tokens, and the head is applied to tiles of tokens.
`tests/peers/test_trl_padded_step.py` compares the update with TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_TILE = 1024


@dataclass(frozen=True)
class Rollout:
    """`input_ids` and `attention_mask` (B, P + C); `mask` (B, C) is 1 on completion tokens."""

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor

    @classmethod
    def of(
        cls,
        prompts: list[list[int]],
        completions: list[list[int]],
        *,
        pad_token_id: int,
        device: Any,
    ) -> Rollout:
        left, right = max(map(len, prompts)), max(map(len, completions))
        ids = torch.full((len(prompts), left + right), pad_token_id)
        attention = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            tokens = torch.tensor(prompt + completion)
            place = slice(left - len(prompt), left + len(completion))
            ids[row, place], attention[row, place] = tokens, 1
        attention = attention.to(device)
        return cls(ids.to(device), attention, attention[:, left:].float())

    def parts(self, rows: int) -> Iterator[tuple[slice, Rollout]]:
        for start in range(0, len(self.mask), rows):
            part = slice(start, start + rows)
            yield part, Rollout(self.input_ids[part], self.attention_mask[part], self.mask[part])


def sequence_logprobs(model: Any, rollout: Rollout) -> Tensor:
    """The summed log-probs of each completion at temperature 1: (B,)."""
    width = rollout.mask.shape[1]
    hidden = model.base_model(
        input_ids=rollout.input_ids, attention_mask=rollout.attention_mask, use_cache=False
    ).last_hidden_state[:, -width - 1 : -1]
    chosen = rollout.mask.bool()
    targets = rollout.input_ids[:, -width:][chosen]
    head = model.get_output_embeddings()

    def score(states: Tensor, tokens: Tensor) -> Tensor:
        logits = head(states).float()
        return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)

    tiles = zip(hidden[chosen].split(_TILE), targets.split(_TILE), strict=True)
    logprobs = torch.cat([checkpoint(score, *tile, use_reentrant=False) for tile in tiles])
    return torch.zeros_like(rollout.mask).masked_scatter(chosen, logprobs).sum(1)


@torch.no_grad()
def sum_kl(model: Any, reference: Any, rollout: Rollout, *, rows: int) -> tuple[Tensor, Tensor]:
    """The summed log-probs before the update, and their differences to the reference's: (B,)
    each."""
    old, kl = [], []
    for _, part in rollout.parts(rows):
        old.append(sequence_logprobs(model, part))
        kl.append(old[-1] - sequence_logprobs(reference, part))
    return torch.cat(old), torch.cat(kl)


def leave_one_out(rewards: Tensor, group: int) -> Tensor:
    """Each reward minus the mean of the other rewards in its group: (B,)."""
    grouped = rewards.view(-1, group)
    others = (grouped.sum(1, keepdim=True) - grouped) / (group - 1)
    return (grouped - others).flatten()


def loss_sum(
    model: Any, rollout: Rollout, advantages: Tensor, old: Tensor, *, epsilon: float = 0.2
) -> Tensor:
    """The clipped loss, summed over the rows."""
    ratio = (sequence_logprobs(model, rollout) - old).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def make_update(
    model: Any,
    optimizer: Any,
    rollout: Rollout,
    rewards: Tensor,
    old: Tensor,
    *,
    group: int,
    rows: int,
    bf16: bool = False,
    max_grad_norm: float = 1.0,
) -> None:
    """One optimizer step, with `rows` rows per pass. `rewards` include the KL penalty."""
    advantages = leave_one_out(rewards, group)
    for place, part in rollout.parts(rows):
        with torch.autocast(rewards.device.type, torch.bfloat16, enabled=bf16):
            loss = loss_sum(model, part, advantages[place], old[place]) / len(rewards)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
