"""The KL penalty: its part in the rewards, and its term in the loss.

With `kl_estimator` exact, the KL of a state is a function of the weights, not of the action that
follows. The gradient of E[R - beta * sum_t KL_t] has two parts: the score function with the KLs of
the states that an action leads to, and the gradient of each KL_t itself. The first part is the
penalty in the rewards (`token_penalty`), the second one a term of the loss (`kl_term`)."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.algorithm.kl_estimate import kl_estimate, ratio_of
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.loss_input import LossInputs
from rloo.config.config import RLOOConfig
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch


def measured_kl(scores: TokenScores | LossInputs) -> Tensor | None:
    """Return the KL of each token for the metrics, (T,), detached: the exact KL if it is known,
    else k1. None without a reference."""
    if scores.kl is not None:
        return scores.kl.detach()
    return None if scores.reference is None else scores.logprobs.detach() - scores.reference


def token_penalty(scores: TokenScores, sequence_T: Tensor, terms: LossContext) -> Tensor:
    """Return the KL penalty of each token, beta times its KL: (T,), float64, detached. The exact
    penalty of a token is that of the state that follows it in its completion, and 0 for the last
    token: the KL of the state before a token does not depend on this token."""
    config, clip = terms.config, terms.config.kl_options.clip
    if scores.kl is not None:
        return terms.beta * following(_clipped(scores.kl.detach().double(), clip), sequence_T)
    assert scores.reference is not None, "the caller asks for it"
    both = scores.logprobs.detach().double(), scores.reference.double()
    return terms.beta * kl_estimate(*both, estimator=config.kl_estimator, clip=clip)


def following(values_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Return for each token the value of the next token of its completion, 0 for the last one:
    (T,)."""
    result = torch.zeros_like(values_T)
    inside = sequence_T[1:] == sequence_T[:-1]
    result[:-1] = torch.where(inside, values_T[1:], 0.0)
    return result


def trained_kl(scores: TokenScores, batch: MicroBatch, terms: LossContext) -> Tensor | None:
    """Return the exact KL (T,) for the loss, None with another estimator. With the KL in the
    reward, completions without a reward pay no penalty, and their KL has no gradient."""
    if scores.kl is None or batch.all_scored or not terms.kl_in_reward:
        return scores.kl
    unscored_T = batch.reward_N.isnan()[batch.sequence_T]
    return torch.where(unscored_T, scores.kl.detach(), scores.kl)


def kl_term(inputs: LossInputs, config: RLOOConfig, weights_T: Tensor | None) -> Tensor:
    """Return the KL of each token in the loss, (T,), with gradient, before it is multiplied by
    beta. If an exact KL is in the reward, the weights of the off-policy correction multiply it, as
    they multiply the advantages."""
    clip = config.kl_options.clip
    if inputs.kl is not None:
        kl = _clipped(inputs.kl, clip)
        return kl if weights_T is None or config.kl_placement == "loss" else kl * weights_T
    assert inputs.reference is not None
    kl = kl_estimate(inputs.logprobs, inputs.reference, estimator=config.kl_estimator, clip=clip)
    return kl * ratio_of(inputs.logprobs - inputs.old) if config.use_bias_correction_kl else kl


def _clipped(kl_T: Tensor, clip: float | None) -> Tensor:
    return kl_T if clip is None else kl_T.clamp(max=clip)
