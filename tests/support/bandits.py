"""The production path of a rollout whose policy is a table: KL, advantages and loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from rloo.algorithm import loss
from rloo.algorithm.advantages import Advantages, batch_advantages
from rloo.algorithm.update import micro_batch_loss
from rloo.model.logprobs import TokenScores
from support.terms import terms_of


class BanditGroup(NamedTuple):
    """The completions `members` of a group, as numbers of sequences. By sequence: the log-probs of
    the tokens under the policy and the reference, and the reward. `weight`: of the prompt."""

    logprobs: Sequence[Tensor]
    reference: Sequence[Tensor]
    rewards: Tensor
    members: Sequence[int]
    weight: float = 1.0


def rollout_loss(groups: Sequence[BanditGroup], config) -> Tensor:
    """The loss of one micro-batch with all groups, as `credit` and `update` have it."""
    flat = [(group, member) for group in groups for member in group.members]
    number_N = [number for number, group in enumerate(groups) for _ in group.members]
    lengths = torch.tensor([len(group.logprobs[member]) for group, member in flat])
    logprobs = torch.cat([group.logprobs[member] for group, member in flat])
    reference = torch.cat([group.reference[member] for group, member in flat])
    batch = SimpleNamespace(
        size=len(flat),
        sequence_T=torch.arange(len(flat)).repeat_interleave(lengths),
        group_N=torch.tensor(number_N),
        all_scored=False,
        reward_N=torch.stack([group.rewards[member] for group, member in flat]),
        weight_N=torch.tensor([group.weight for group, _ in flat], dtype=torch.float64),
        truncated_N=torch.zeros(len(flat), dtype=torch.bool),
        keys=[(number, place) for place, number in enumerate(number_N)],
        lengths=lengths.tolist(),
        policy_T=logprobs.detach(),
        behavior_T=logprobs.detach(),
    )
    # Each token's part of the entropy has the gradient of a bonus that is not constant.
    policy = SimpleNamespace(
        logprobs=lambda *_, **__: TokenScores(logprobs, -logprobs.exp() * logprobs, None, reference)
    )
    terms = terms_of(config)
    credit = Advantages(from_update=True)
    if not terms.kl_in_reward:
        values = batch_advantages(batch, logprobs, logprobs.detach(), terms)
        sizes = batch.lengths if config.importance_sampling_level == "token" else 1
        credit = Advantages(dict(zip(batch.keys, values.split(sizes), strict=True)))
    denominator = loss.loss_denominator(
        config.loss_aggregation,
        num_sequences=len(flat),
        num_tokens=len(logprobs),
        constant=config.loss_constant,
    )
    return micro_batch_loss(policy, batch, credit, terms, denominator)[0]
