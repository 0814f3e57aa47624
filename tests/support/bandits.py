"""The production path of a rollout whose policy is a table: KL, advantages and loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from rloo.algorithm import loss
from rloo.algorithm.advantages import Advantages, add_advantages
from rloo.algorithm.update import micro_batch_loss
from rloo.model.logprobs import TokenScores
from support.terms import terms_of

# Of every baseline, if the estimator reads them. They are given: nothing is fitted.
COEFFICIENTS = (0.15, -0.6)


class TokenTables(NamedTuple):
    """Of the tokens of each sequence: the log-probs under the reference, the KLs over the
    vocabulary, the log-probs under the sampler (by default the policy), and the sums of squared
    probabilities."""

    reference: Sequence[Tensor]
    kls: Sequence[Tensor] | None = None
    sampled: Sequence[Tensor] | None = None
    collision: Sequence[Tensor] | None = None


class BanditGroup(NamedTuple):
    """The completions `members` of a group, as numbers of sequences. By sequence: the log-probs of
    the tokens under the policy, other values of the tokens, and the reward. `weight`: of the
    prompt, and after a `pilot` of so many completions, `weight_after`."""

    logprobs: Sequence[Tensor]
    tables: TokenTables
    rewards: Tensor
    members: Sequence[int]
    weight: float = 1.0
    pilot: int | None = None
    weight_after: float = 1.0

    def pilots(self) -> list[bool]:
        """Whether each completion belongs to the pilot."""
        return [place < (self.pilot or 0) for place, _ in enumerate(self.members)]

    def weights(self) -> list[float]:
        """The weight of each completion."""
        if self.pilot is None:
            return [self.weight] * len(self.members)
        return [self.weight if first else self.weight_after for first in self.pilots()]


def rollout_loss(groups: Sequence[BanditGroup], config) -> Tensor:
    """The loss of one micro-batch with all groups, as `credit` and `update` have it."""
    flat = [(group, member) for group in groups for member in group.members]
    number_N = [number for number, group in enumerate(groups) for _ in group.members]
    lengths = torch.tensor([len(group.logprobs[member]) for group, member in flat])
    logprobs = torch.cat([group.logprobs[member] for group, member in flat])
    exact = config.kl_estimator == "exact"
    reference, kl, sampled, collision = (
        None
        if flat[0][0].tables[place] is None
        else torch.cat([group.tables[place][member] for group, member in flat])
        for place in range(4)
    )
    batch = SimpleNamespace(
        size=len(flat),
        sequence_T=torch.arange(len(flat)).repeat_interleave(lengths),
        group_N=torch.tensor(number_N),
        all_scored=False,
        reward_N=torch.stack([group.rewards[member] for group, member in flat]),
        weight_N=torch.tensor([w for g in groups for w in g.weights()], dtype=torch.float64),
        pilot_N=torch.tensor([p for g in groups for p in g.pilots()])
        if any(any(group.pilots()) for group in groups)
        else None,
        coefficient_N2=torch.tensor([COEFFICIENTS], dtype=torch.float64).expand(len(flat), 2),
        truncated_N=torch.zeros(len(flat), dtype=torch.bool),
        keys=[(number, place) for place, number in enumerate(number_N)],
        lengths=lengths.tolist(),
        policy_T=logprobs.detach(),
        behavior_T=(logprobs if sampled is None else sampled).detach(),
    )
    # Each token's part of the entropy has the gradient of a bonus that is not constant.
    entropy = -logprobs.exp() * logprobs
    scores = TokenScores(logprobs, entropy, None, reference, collision, kl if exact else None)
    policy = SimpleNamespace(logprobs=lambda *_, **__: scores)
    terms = terms_of(config)
    credit = Advantages(from_update=True)
    if not terms.values_from_forward:
        credit = Advantages()
        add_advantages(credit, batch, scores, terms)
    denominator = loss.loss_denominator(
        config.loss_aggregation,
        num_sequences=len(flat),
        num_tokens=len(logprobs),
        constant=config.loss_constant,
    )
    return micro_batch_loss(policy, batch, credit, terms, denominator)[0]
