"""The loss of REINFORCE Leave-One-Out as pure functions on tensors.

Sequences are ragged and stored flat. Tensors named `_T` have one entry for each completion token,
tensors named `_N` have one entry for each completion. `sequence_T` is the index of each token's
completion. Results have the dtype of the inputs, float64 included.

    reward -> clip -> minus beta * KL -> minus the mean of the other rewards -> (scale) -> loss

The default loss is that of Ahmadian et al. 2024 (arXiv 2402.14740), equations 5 to 9. The whole
completion is one action, so the log-probs of its tokens are summed. The KL penalty is part of the
reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rloo.algorithm.kl_estimate import has_kl_term, ratio_of
from rloo.algorithm.loss_input import LossInputs
from rloo.algorithm.ragged import Completions, sum_by
from rloo.algorithm.token_kl import kl_term
from rloo.config.config import RLOOConfig

RatioLevel = Literal["sequence", "sequence_mean", "token"]
Aggregation = Literal["sequence", "sequence_token_mean", "token_mean", "constant"]
WeightMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def loss(
    inputs: LossInputs, config: RLOOConfig, beta: float, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, to be minimised, and sums for the metrics. The loss is the
    clipped surrogate with importance weights, plus `beta` times the KL if the loss has a KL term,
    minus the entropy bonus. It is divided by `denominator` (from `loss_denominator`)."""
    weights, sums = _correction(inputs, config)
    form, old = PolicyLossConfig.of(config), inputs.old
    weight_T = inputs.weight_N[inputs.completions.sequence_T]
    by_token = form.ratio_level == "token"
    advantages = inputs.advantages * (weight_T if by_token else inputs.weight_N)
    result = policy_loss(inputs.logprobs, old, advantages, inputs.completions, form, weights)
    others: Tensor | float = 0.0
    if has_other_terms(config, beta):
        others_T = weight_T * _other_terms(inputs, config, beta, weights)
        others = aggregate(others_T, inputs.completions, config.loss_aggregation)
    sums |= {"clipped_low": result.clipped_low.sum(), "clipped_high": result.clipped_high.sum()}
    return result.loss / denominator + others / denominator, sums


def has_other_terms(config: RLOOConfig, beta: float) -> bool:
    """Return whether the loss has terms that are not 0 when the advantage is 0."""
    return has_kl_term(config, beta) or config.entropy_coef != 0


def _other_terms(
    inputs: LossInputs, config: RLOOConfig, beta: float, weights: Tensor | None
) -> Tensor:
    """The KL term minus the entropy bonus, (T,); 0 for truncated completions if masked."""
    total_T = torch.zeros_like(inputs.logprobs)
    if config.entropy_coef != 0:  # the entropy's backward pass reads the vocabulary
        total_T = total_T - config.entropy_coef * inputs.entropy
    if has_kl_term(config, beta):
        total_T = total_T + beta * kl_term(inputs, config, weights)
    if config.mask_truncated_completions:
        masked_T = inputs.truncated_N[inputs.completions.sequence_T]
        total_T = torch.where(masked_T, 0.0, total_T)
    return total_T


def _correction(inputs: LossInputs, config: RLOOConfig) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The weights of the off-policy correction (None without correction), and their sums."""
    mode = config.rollout_importance_sampling_mode
    if mode is None or mode == "off":
        return None, {}
    weights = importance_weights(
        inputs.old - inputs.behavior,
        inputs.completions,
        mode=mode,
        upper=config.rollout_importance_sampling_threshold,
        lower=config.rollout_importance_sampling_min,
    )
    one_T = torch.ones_like(weights)
    each_N = sum_by(weights, *inputs.completions) / sum_by(one_T, *inputs.completions)
    return weights, {
        "weight": weights.sum(),
        "completion_weight": each_N.sum(),
        "completion_weight_squares": (each_N**2).sum(),
        "sampling/importance_sampling_ratio/max": weights.max(),
    }


def importance_weights(
    log_ratio_T: Tensor,
    completions: Completions,
    *,
    mode: WeightMode,
    upper: float,
    lower: float | None = None,
) -> Tensor:
    """Return weights (T,), detached, that correct for tokens sampled from another distribution.

    `log_ratio_T` is the trainer's log-prob before the rollout's first update, minus the behavior
    log-prob. The weight of a token is its ratio, or the ratio of its completion (the product over
    its tokens). Truncation bounds the weight by `upper` (Espeholt et al. 2018). Masking sets a
    weight above `upper` or below `lower` to 0 (IcePop; token_mask is AReaL's decoupled loss, arXiv
    2505.24298, equation 5).
    """
    log_ratio = log_ratio_T.detach()
    if mode.startswith("sequence"):
        log_ratio = sum_by(log_ratio, *completions)[completions.sequence_T]
    ratio = ratio_of(log_ratio)
    if mode.endswith("truncate"):
        return ratio.clamp(max=upper)
    inside = (ratio <= upper) & (ratio >= (0.0 if lower is None else lower))
    return torch.where(inside, ratio, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """The form of the clipped surrogate: the level of the ratio, its clip range, and the
    aggregation of terms. `of` reads it from the options."""

    ratio_level: RatioLevel = "sequence"
    aggregation: Aggregation = "sequence"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None

    @classmethod
    def of(cls, config: RLOOConfig) -> PolicyLossConfig:
        """Return the form that the options describe."""
        return cls(
            ratio_level=config.importance_sampling_level,
            aggregation=config.loss_aggregation,
            epsilon_low=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
            delta=config.delta,
        )


PAPER = PolicyLossConfig()


class PolicyLoss(NamedTuple):
    """The surrogate `loss`, a scalar, and masks of clipped ratios: (N,), or (T,) with level
    "token"."""

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def loss_denominator(
    aggregation: Aggregation, *, num_sequences: int, num_tokens: int, constant: float | None
) -> float:
    """Return the divisor of an optimizer step's loss, a sum over all ranks and micro-batches. The
    divisor is the number of completions in the loss. With "token_mean", it is the number of their
    tokens. With "constant", it is the number of completions times `constant` (Dr. GRPO). Raises
    ValueError if `constant` is None."""
    if aggregation == "token_mean":
        return float(max(num_tokens, 1))
    if aggregation == "constant":
        if constant is None:
            raise ValueError("loss_aggregation is constant; it needs a number (loss_constant)")
        return max(num_sequences, 1) * constant
    return float(max(num_sequences, 1))


def policy_loss(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages: Tensor,
    completions: Completions,
    form: PolicyLossConfig = PAPER,
    weights_T: Tensor | None = None,
) -> PolicyLoss:
    """Return the clipped surrogate, to be minimised, as a sum over this micro-batch.

    `advantages` are (N,), or (T,) with level "token". `old_T` are the trainer's log-probs before
    the first update on these completions. In the first update they are `logprobs_T.detach()`: the
    ratio is 1 and the gradient is that of REINFORCE. Level "sequence" has one ratio and one term
    per completion: the product of its tokens' ratios (TRL, the paper). "sequence_mean" has one term
    per token; the ratio of each token is the geometric mean over its completion (GSPO, arXiv
    2507.18071). "token" has one ratio and one term per token (AReaL, ms-swift, verl). Before the
    first update, all three levels have the same gradient. `delta` bounds the ratio if the advantage
    is negative (dual clip, arXiv 1912.09729). `weights_T` multiply the terms of tokens; with level
    "sequence", the mean weight of a completion multiplies its term. `aggregate` sums the terms.
    """
    sequence_T, size = completions
    level, aggregation = form.ratio_level, form.aggregation
    log_ratio = logprobs_T - old_T.detach()
    if level != "token":
        log_ratio = sum_by(log_ratio, sequence_T, size)
        if level == "sequence_mean":
            log_ratio = log_ratio / _lengths(sequence_T, size)
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1.0 - form.epsilon_low, 1.0 + form.epsilon_high)
    bounded = ratio if form.delta is None else ratio.clamp(max=form.delta)
    terms = -torch.minimum(bounded * advantages, clipped * advantages)
    if level != "sequence":
        terms_T = terms if level == "token" else terms[sequence_T]
        weighted = terms_T if weights_T is None else terms_T * weights_T
        loss = aggregate(weighted, completions, aggregation)
    else:
        if weights_T is not None:
            terms = terms * sum_by(weights_T, sequence_T, size) / _lengths(sequence_T, size)
        if aggregation == "sequence_token_mean":
            terms = terms / _lengths(sequence_T, size)
        loss = terms.sum()
    with torch.no_grad():
        clipped_low = (ratio < 1.0 - form.epsilon_low) & (advantages < 0)
        clipped_high = (ratio > 1.0 + form.epsilon_high) & (advantages > 0)
    return PolicyLoss(loss, clipped_low, clipped_high)


def aggregate(values_T: Tensor, completions: Completions, aggregation: Aggregation) -> Tensor:
    """Return the sum over tokens, a scalar. `loss` divides the sum by `loss_denominator`.
    "sequence_token_mean" first divides each completion's sum by its length (the formula on AReaL's
    RLOO page)."""
    if aggregation == "sequence_token_mean":
        return (sum_by(values_T, *completions) / _lengths(*completions)).sum()
    return values_T.sum()


def _lengths(sequence_T: Tensor, size: int) -> Tensor:
    return sum_by(torch.ones_like(sequence_T), sequence_T, size).clamp(min=1)
