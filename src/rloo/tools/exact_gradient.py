"""Compares the expected gradient of an estimator with the exact gradient. The expectation is over
all rollouts that a small policy (a table of logits in float64) can sample, with their
probabilities.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import LoadedEstimator
from rloo.algorithm.ragged import sum_by
from rloo.algorithm.token_kl import following
from rloo.data.group_budget import GroupBudget
from rloo.data.variance_sampler import draw_systematically


def logits_table(number: int, num_tokens: int) -> Tensor:
    """Return a table of logits (V + 1, V) for `TabularPolicy`, a different one for each
    `number`."""
    rows = torch.arange((num_tokens + 1) * num_tokens, dtype=torch.float64)
    return torch.sin(rows * (1.3 + number)).view(num_tokens + 1, num_tokens)


@dataclass(frozen=True)
class TabularPolicy:
    """A prompt with a tabular policy and a finite list of completions. A completion has one or two
    tokens of a vocabulary of V tokens. Token 0 ends a completion.

    `logits` (V + 1, V) define the policy: row 0 is for the first token, row 1 + a for the token
    after token a. `reference` (V + 1, V) are the logits of the reference. `reward_S` are the
    rewards of `sequences`.
    """

    logits: Tensor
    reference: Tensor
    reward_S: Tensor

    @cached_property
    def sequences(self) -> list[tuple[int, ...]]:
        """All S possible sequences."""
        tokens = range(self.logits.shape[1])
        return [(0,), *itertools.product(tokens[1:], tokens)]

    @cached_property
    def length_S(self) -> Tensor:
        """The number of tokens of each sequence."""
        return torch.tensor([len(sequence) for sequence in self.sequences])

    @cached_property
    def owner_T(self) -> Tensor:
        """The index of the sequence of each token, for all tokens of all sequences."""
        return torch.arange(len(self.sequences)).repeat_interleave(self.length_S)

    @cached_property
    def state_T(self) -> Tensor:
        """The row of `logits` that each token of all sequences is sampled from."""
        states = [(0, *(1 + token for token in s[:-1])) for s in self.sequences]
        return torch.tensor(list(itertools.chain(*states)))

    def token_logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probs of all tokens of all sequences, concatenated, under `logits`."""
        token_T = torch.tensor(list(itertools.chain(*self.sequences)))
        return logits.log_softmax(-1)[self.state_T, token_T]

    def state_kl(self, logits: Tensor) -> Tensor:
        """Return KL(`logits` || reference) over the vocabulary at the state before each token of
        all sequences."""
        ours, theirs = logits.log_softmax(-1), self.reference.log_softmax(-1)
        return (ours.exp() * (ours - theirs)).sum(-1)[self.state_T]

    def token_kl(self, *, exact: bool = False) -> Tensor:
        """Return the KL penalty of all tokens of all sequences at beta 1: log policy - log
        reference, or the exact penalty (`rloo.algorithm.token_kl.token_penalty`)."""
        if exact:
            return following(self.state_kl(self.logits), self.owner_T)
        return self.token_logprobs(self.logits) - self.token_logprobs(self.reference)

    def token_score_norms(self) -> Tensor:
        """Return 1 - 2 p(token) + sum of p(v)^2 for all tokens of all sequences: the squared norm
        of the gradient of the token's log-prob by its row of logits."""
        logits = self.logits.clone().requires_grad_()
        found = [
            torch.autograd.grad(lp, logits, retain_graph=True)[0].square().sum()
            for lp in self.token_logprobs(logits)
        ]
        return torch.stack(found)

    def logprob_S(self, logits: Tensor) -> Tensor:
        """Return the log-probs of the sequences under `logits`."""
        return sum_by(self.token_logprobs(logits), self.owner_T, len(self.sequences))

    def exact_gradient(self, beta: float) -> Tensor:
        """Return the gradient of E[reward] - beta KL(policy || reference) w.r.t. the logits."""
        logits = self.logits.clone().requires_grad_()
        logprob_S = self.logprob_S(logits)
        kl_S = logprob_S - self.logprob_S(self.reference)
        value = (logprob_S.exp() * (self.reward_S - beta * kl_S)).sum()
        return torch.autograd.grad(value, logits)[0]


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """The expected gradient of an estimator at one prompt, compared with the exact gradient.
    `scale` is the projection of the expected gradient on the exact gradient, divided by the norm of
    the exact gradient. `cosine` is the cosine of the angle between both. `error` is the norm of
    their difference, divided by the norm of the exact gradient. `variance` is the trace of the
    covariance of the estimated gradient, divided by the squared scale: the noise per unit of
    signal. `gradient` (D,) is the expected gradient."""

    scale: float
    cosine: float
    error: float
    variance: float
    gradient: Tensor = field(repr=False, compare=False)


def measure(
    estimator: LoadedEstimator,
    bandits: Sequence[TabularPolicy],
    size: int,
    beta: float,
    *,
    exact_kl: bool = False,
) -> list[GradientComparison]:
    """For each prompt in `bandits`, compare the expected gradient of `estimator` with the exact
    gradient. The expectation is over all rollouts with `size` completions per prompt. All prompts
    have the same V. The loss is the mean over completions; ratios are 1."""
    first, num_prompts = bandits[0], len(bandits)
    number = len(first.sequences)
    # R rollouts of N completions: the sequence and the prompt of each completion.
    drawn = list(itertools.product(range(number), repeat=size * num_prompts))
    sequence_RN = torch.tensor(drawn)
    prompt_RN = torch.arange(num_prompts).repeat_interleave(size).expand_as(sequence_RN)
    logprob_PS = torch.stack([b.logprob_S(b.logits) for b in bandits])
    weight_R = logprob_PS[prompt_RN, sequence_RN].sum(1).exp()
    # All completions and all of their tokens, concatenated.
    sequence, prompt = sequence_RN.flatten(), prompt_RN.flatten()
    length = first.length_S[sequence]
    owner_T = torch.arange(len(length)).repeat_interleave(length)
    starts = (first.length_S.cumsum(0) - first.length_S)[sequence] - (length.cumsum(0) - length)
    token_T = torch.arange(len(owner_T)) + starts[owner_T]
    kl_PT = torch.stack([bandit.token_kl(exact=exact_kl) for bandit in bandits])
    norm_PT = torch.stack([bandit.token_score_norms() for bandit in bandits])
    returns = EstimatorInput(
        torch.stack([b.reward_S for b in bandits])[prompt, sequence],
        beta * kl_PT[prompt[owner_T], token_T],
        owner_T,
        torch.arange(len(drawn) * num_prompts).repeat_interleave(size),
        torch.zeros_like(prompt, dtype=torch.bool),
        norm_PT[prompt[owner_T], token_T] if estimator.reads_score_norms else None,
    )
    rollouts = returns.split([size * num_prompts] * len(drawn))
    parts = rollouts if estimator.over_rollout else [returns]
    advantage_T = torch.cat([part.per_token(estimator.compute(part)) for part in parts])
    found = []
    for place, bandit in enumerate(bandits):
        # Sum grad log p times advantage over each rollout's tokens at this prompt.
        scores = torch.autograd.functional.jacobian(bandit.token_logprobs, bandit.logits).flatten(1)
        here_T = advantage_T * (prompt[owner_T] == place)
        sums = torch.zeros(len(drawn), scores.shape[1], dtype=torch.float64)
        rollout_T = owner_T // (size * num_prompts)
        sums.index_add_(0, rollout_T, here_T[:, None] * scores[token_T])
        if exact_kl:
            slopes = torch.autograd.functional.jacobian(bandit.state_kl, bandit.logits).flatten(1)
            paid_T = beta * (prompt[owner_T] == place).double()
            sums.index_add_(0, rollout_T, -paid_T[:, None] * slopes[token_T])
        found.append(_compare(sums / size, weight_R, bandit.exact_gradient(beta).flatten()))
    return found


def _compare(gradient_RD: Tensor, weight_R: Tensor, exact_D: Tensor) -> GradientComparison:
    mean_D = weight_R @ gradient_RD
    scale = (mean_D @ exact_D / (exact_D @ exact_D)).item()
    variance = (weight_R @ (gradient_RD**2).sum(1) - mean_D @ mean_D).item()
    return GradientComparison(
        scale=scale,
        cosine=torch.cosine_similarity(mean_D, exact_D, dim=0).item(),
        error=((mean_D - exact_D).norm() / exact_D.norm()).item(),
        variance=variance / scale**2 if scale else float("inf"),
        gradient=mean_D,
    )


def all_draws(
    share_N: Sequence[float], num: int
) -> Iterator[tuple[float, list[tuple[int, float]]]]:
    """Yield every outcome of `draw_systematically` with its probability: the length of an interval
    of the one random number in which the outcome does not change."""
    shares = np.array(share_N)
    bounds = shares.cumsum() * (num / shares.sum())
    edges = np.unique(np.concatenate([[0.0, 1.0], bounds - np.floor(bounds)]))
    for low, high in itertools.pairwise(edges.tolist()):
        yield high - low, draw_systematically(shares, num, (low + high) / 2)


def draw_error(share_N: Sequence[float], gradients: Sequence[Tensor], num: int) -> float:
    """Return the error of the expected gradient if `num` prompts are drawn with the shares N q(x)
    and weighted: the distance from the expected gradient of uniform drawing, divided by the norm of
    the latter. `gradients` are the expected gradients at the prompts, each of its own logits."""
    gradient_NND = _apart(gradients)
    drawn = all_draws(share_N, num)
    each = [(c, [(weight, gradient_NND[n]) for n, weight in draws]) for c, draws in drawn]
    return _error(each, gradient_NND.mean(0))


def size_error(
    share_N: Sequence[float],
    deviation_N: Sequence[float],
    gradients: Mapping[int, Sequence[Tensor]],
    num: int,
) -> float:
    """Return the error as `draw_error` does, if the drawn prompts have different numbers of
    completions by `GroupBudget`, with these deviations. `gradients` has the expected gradients at
    the prompts for each number of completions: 2, the mean number, ..., the largest number. Uniform
    drawing has the mean number."""
    (_, usual, *_), most = sorted(gradients), max(gradients)
    by_size = {size: _apart(some) for size, some in gradients.items()}
    budget, each = GroupBudget(usual, most, num), []
    for chance, draws in all_draws(share_N, num):
        sizes = budget.sizes(np.array([weight * deviation_N[n] for n, weight in draws]))
        parts = zip(draws, sizes, strict=True)
        each.append((chance, [(weight, by_size[size][n]) for (n, weight), size in parts]))
    return _error(each, by_size[usual].mean(0))


def _apart(gradients: Sequence[Tensor]) -> Tensor:
    """The gradients (N, D) of N prompts by the logits of all of them, (N, N, D)."""
    unit_NN = torch.eye(len(gradients), dtype=torch.float64)
    return torch.stack([g * unit[:, None] for g, unit in zip(gradients, unit_NN, strict=True)])


def _error(
    outcomes: Sequence[tuple[float, Sequence[tuple[float, Tensor]]]], uniform: Tensor
) -> float:
    """The distance of the mean over `outcomes`, each a probability and the weights and gradients of
    its draws, from `uniform`, divided by the norm of `uniform`."""
    mean = torch.zeros_like(uniform)
    for chance, draws in outcomes:
        for weight, gradient in draws:
            mean += chance * weight / len(draws) * gradient
    return ((mean - uniform).norm() / uniform.norm()).item()
