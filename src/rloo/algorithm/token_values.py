"""The values of tokens that advantages need and only a forward pass has (the KL penalty, and the
squared score norm if the estimator reads it), and the estimator's input with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.token_kl import token_penalty
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch, coefficients_of, pilot_mask
from rloo.model.policy import Policy
from rloo.types import Sample

Key = tuple[int, int]


class TokenValues(NamedTuple):
    """The KL penalties, and the squared score norms (None if the estimator does not read them), of
    T tokens: (T,), float64, detached. The penalties are 0 if the KL is not in the reward."""

    penalty_T: Tensor
    score_norm_T: Tensor | None

    def stacked(self) -> Tensor:
        """One tensor, (T, 1) or (T, 2)."""
        return torch.stack([x for x in self if x is not None], dim=1)

    @classmethod
    def of_stacked(cls, parts: Sequence[Tensor]) -> TokenValues:
        """The values of `stacked` tensors, concatenated."""
        penalty_T, *norms = torch.cat(list(parts)).unbind(1)
        return cls(penalty_T, norms[0] if norms else None)


def score_first(policy: Policy, batch: MicroBatch, terms: LossContext) -> TokenScores:
    """The scores of a rollout's first forward pass: with the log-probs under the reference if the
    KL is needed, and with the collision probabilities if the estimator reads score norms."""
    collision = terms.estimator.reads_score_norms
    reference = terms.kl_in_loss or terms.kl_in_reward
    return policy.logprobs(batch, reference=reference, collision=collision)


@torch.no_grad()
def score_before_update(policy: Policy, batch: MicroBatch, terms: LossContext) -> TokenScores:
    """As `score_first`, in a pass of its own, without gradients. The entropy is computed only with
    the collision probabilities or the exact KL."""
    collision, reference = terms.estimator.reads_score_norms, terms.kl_in_reward
    if collision or (reference and terms.config.kl_estimator == "exact"):
        return policy.logprobs(batch, reference=reference, collision=collision)
    logprobs = policy.score(batch)
    theirs = policy.reference_logprobs(batch) if reference else None
    return TokenScores(logprobs, logprobs.new_empty(0), None, theirs)


def token_values(scores: TokenScores, sequence_T: Tensor, terms: LossContext) -> TokenValues:
    """Return the KL penalties, and 1 - 2 p + the collision probability. `scores` must have what
    they are computed from."""
    logprobs = scores.logprobs.detach().double()
    penalty_T, norm_T = torch.zeros_like(logprobs), None
    if terms.kl_in_reward:
        penalty_T = token_penalty(scores, sequence_T, terms)
    if terms.estimator.reads_score_norms:
        norm_T = score_norms(scores)
    return TokenValues(penalty_T, norm_T)


def score_norms(scores: TokenScores) -> Tensor:
    """Return the squared score norms (T,), float64. `scores` must have collision
    probabilities."""
    assert scores.collision is not None
    return 1.0 - 2.0 * scores.logprobs.detach().double().exp() + scores.collision.double()


def returns_of_batch(batch: MicroBatch, scores: TokenScores, terms: LossContext) -> EstimatorInput:
    """Return the estimator's input for a micro-batch of whole groups. `scores` as for
    `token_values`."""
    penalty_T, norm_T = token_values(scores, batch.sequence_T, terms)
    return EstimatorInput(
        batch.reward_N, penalty_T, batch.sequence_T, batch.group_N, batch.truncated_N, norm_T,
        batch.pilot_N, batch.coefficient_N2,
    )  # fmt: skip


def returns_of_samples(samples: Sequence[Sample], values: Mapping[Key, Tensor]) -> EstimatorInput:
    """Return the estimator's input for a whole rollout. `values` has the stacked `TokenValues` of
    each completion; if it is empty, the KL penalty is 0."""
    lengths = torch.tensor([s.num_trained for s in samples])
    found = TokenValues(torch.zeros(int(lengths.sum()), dtype=torch.float64), None)
    if values:
        found = TokenValues.of_stacked([values[s.key] for s in samples])
    return EstimatorInput(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        found.penalty_T,
        torch.arange(len(samples)).repeat_interleave(lengths),
        torch.tensor([s.key[0] for s in samples]),
        torch.tensor([s.truncated for s in samples]),
        found.score_norm_T,
        pilot_mask(samples),
        coefficients_of(samples),
    )


def without_signal(samples: Sequence[Sample], terms: LossContext) -> dict[Key, Tensor]:
    """The advantages that are known to be 0 before the first forward pass: those of groups with
    equal rewards, if there is no KL penalty and the baseline is a mean of their rewards without the
    completion itself."""
    arguments, estimator = terms.config.estimator_kwargs or {}, terms.estimator
    left_out = arguments.get("leave1out", True) and not estimator.reads_coefficients
    known = estimator.built_in and left_out
    if terms.beta != 0 or not known:
        return {}
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.key[0], set()).add(sample.reward)
    return {
        s.key: torch.zeros(s.num_trained).double() for s in samples if len(rewards[s.key[0]]) == 1
    }
