"""Compares the expected gradient of an estimator with the exact gradient. The expectation is over
all rollouts that a small policy (a table of logits in float64) can sample, with their
probabilities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import LoadedEstimator
from rloo.algorithm.ragged import sum_by
from rloo.algorithm.regression import Observation, WeightedSums, observe
from rloo.algorithm.token_kl import following
from rloo.data.group_budget import GroupBudget
from rloo.data.reward_estimate import RewardedPrompt, RewardEstimate
from rloo.data.variance_sampler import VarianceSampler, draw_systematically
from rloo.types import LEAVE_ONE_OUT, Coefficients, Group, Prompt

# So many times the enumerated rollouts are known to an estimator that fits on earlier rollouts.
MANY = 1e6


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
    coefficients: Coefficients | None = None,
) -> list[GradientComparison]:
    """For each prompt in `bandits`, compare the expected gradient of `estimator` with the exact
    gradient. The expectation is over all rollouts with `size` completions per prompt. All prompts
    have the same V. The loss is the mean over completions; ratios are 1. An estimator that reads
    coefficients gets `coefficients`, by default those that are fitted to all of these rollouts, as
    after many earlier ones."""
    num_prompts = len(bandits)
    sequence_RN = _all_rollouts(bandits[0], size * num_prompts)
    prompt_N = torch.arange(num_prompts).repeat_interleave(size)
    logprob_PS = torch.stack([b.logprob_S(b.logits) for b in bandits])
    weight_R = logprob_PS[prompt_N, sequence_RN].sum(1).exp()
    factor_N = torch.full((size * num_prompts,), 1.0 / size, dtype=torch.float64)
    terms = _Terms(estimator, beta, exact_kl, factor_N)
    if estimator.reads_coefficients:
        if coefficients is None:
            coefficients = terms.fit(bandits, sequence_RN, weight_R)
        terms = replace(terms, coefficients=coefficients)
    gradients = terms.gradients(bandits, sequence_RN)
    return [
        _compare(gradient_RD, weight_R, bandit.exact_gradient(beta).flatten())
        for gradient_RD, bandit in zip(gradients, bandits, strict=True)
    ]


def _all_rollouts(bandit: TabularPolicy, num: int) -> Tensor:
    """All rollouts of `num` completions: the numbers of their sequences, (R, num)."""
    return torch.tensor(list(itertools.product(range(len(bandit.sequences)), repeat=num)))


@dataclass(frozen=True, slots=True)
class _Terms:
    """The loss of rollouts of N completions. `factor_N` multiplies the terms of each completion;
    the first `pilot` completions of a prompt are its pilot."""

    estimator: LoadedEstimator
    beta: float
    exact_kl: bool
    factor_N: Tensor
    pilot: int | None = None
    coefficients: Coefficients = LEAVE_ONE_OUT

    def fit(
        self, bandits: Sequence[TabularPolicy], sequence_RN: Tensor, weight_R: Tensor
    ) -> Coefficients:
        """Return the coefficients of the regression over MANY times R rollouts with the
        probabilities `weight_R`."""
        returns, _ = self._returns(bandits, sequence_RN)
        size = sequence_RN.shape[1] // len(bandits)
        keys = [(number, 0) for number in range(returns.num_completions)]
        rows = torch.stack(list(observe(keys, returns).values()))
        rows[:, 0] *= weight_R.repeat_interleave(sequence_RN.shape[1])
        sums = WeightedSums()
        for group in rows.split(size):
            sums.add([Observation(*row) for row in group.tolist()])
        sums.squares /= MANY
        return sums.fit(LEAVE_ONE_OUT)

    def gradients(self, bandits: Sequence[TabularPolicy], sequence_RN: Tensor) -> list[Tensor]:
        """Return minus the gradient of each of R rollouts by the logits of each prompt, (R, D). A
        rollout has equally many completions of each prompt, in order."""
        returns, token_T = self._returns(bandits, sequence_RN)
        rollouts, number = sequence_RN.shape
        parts = returns.split([number] * rollouts) if self.estimator.over_rollout else [returns]
        advantage_T = torch.cat([p.per_token(self.estimator.advantages(p)) for p in parts])
        place = torch.arange(number).repeat(rollouts)
        owner_T, prompt = returns.sequence_T, place // (number // len(bandits))
        factor_T, rollout_T = self.factor_N[place][owner_T], owner_T // number
        found = []
        for index, bandit in enumerate(bandits):
            # Sum grad log p times advantage over each rollout's tokens at this prompt.
            scores = _jacobian(bandit.token_logprobs, bandit.logits)
            here_T = factor_T * (prompt[owner_T] == index)
            sums = torch.zeros(rollouts, scores.shape[1], dtype=torch.float64)
            sums.index_add_(0, rollout_T, (here_T * advantage_T)[:, None] * scores[token_T])
            if self.exact_kl:
                slopes = _jacobian(bandit.state_kl, bandit.logits)
                sums.index_add_(0, rollout_T, -self.beta * here_T[:, None] * slopes[token_T])
            found.append(sums)
        return found

    def _returns(
        self, bandits: Sequence[TabularPolicy], sequence_RN: Tensor
    ) -> tuple[EstimatorInput, Tensor]:
        """The returns of R rollouts, and the index of each of their tokens among all tokens of all
        sequences."""
        first, num_prompts, (rollouts, number) = bandits[0], len(bandits), sequence_RN.shape
        size = number // num_prompts
        # All completions and all of their tokens, concatenated.
        sequence, place = sequence_RN.flatten(), torch.arange(number).repeat(rollouts)
        prompt = place // size
        length = first.length_S[sequence]
        owner_T = torch.arange(len(length)).repeat_interleave(length)
        starts = (first.length_S.cumsum(0) - first.length_S)[sequence]
        starts = starts - (length.cumsum(0) - length)
        token_T = torch.arange(len(owner_T)) + starts[owner_T]
        kl_PT = torch.stack([bandit.token_kl(exact=self.exact_kl) for bandit in bandits])
        norm_PT = torch.stack([bandit.token_score_norms() for bandit in bandits])
        returns = EstimatorInput(
            torch.stack([b.reward_S for b in bandits])[prompt, sequence],
            self.beta * kl_PT[prompt[owner_T], token_T],
            owner_T,
            torch.arange(rollouts * num_prompts).repeat_interleave(size),
            torch.zeros_like(prompt, dtype=torch.bool),
            norm_PT[prompt[owner_T], token_T] if self.estimator.reads_score_norms else None,
            None if self.pilot is None else place % size < self.pilot,
            torch.tensor([self.coefficients], dtype=torch.float64).expand(len(prompt), 2),
        )
        return returns, token_T


def _jacobian(function: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(function, logits).flatten(1)


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
    """Yield every outcome of `draw_systematically` with its probability."""
    shares = np.array(share_N)
    for low, high in constant_intervals(shares, num):
        yield high - low, draw_systematically(shares, num, (low + high) / 2)


def constant_intervals(share_N: np.ndarray, num: int) -> Iterator[tuple[float, float]]:
    """Yield the intervals of the one random number of `draw_systematically` in which the outcome
    does not change."""
    bounds = share_N.cumsum() * (num / share_N.sum())
    edges = np.unique(np.concatenate([[0.0, 1.0], bounds - np.floor(bounds)]))
    yield from itertools.pairwise(edges.tolist())


def draw_error(
    drawn: Iterable[tuple[float, Sequence[tuple[int, float]]]], gradients: Sequence[Tensor]
) -> float:
    """Return the error of the expected gradient if prompts are drawn and weighted: the distance
    from the expected gradient of uniform drawing, divided by the norm of the latter. `drawn` has
    every outcome of the draws (`all_draws`). `gradients` are the expected gradients at the prompts,
    each of its own logits."""
    gradient_NND = _apart(gradients)
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


def pilot_error(
    estimator: LoadedEstimator,
    bandits: Sequence[TabularPolicy],
    beta: float,
    budget: GroupBudget,
    *,
    exact_kl: bool = False,
) -> float:
    """Return the error as `draw_error` does, if the numbers of completions of two prompts follow
    from the rewards of their pilots (`VarianceSampler.second_sizes`). The expectation is over every
    pilot, and every second stage that may follow. In one stage each prompt has `num_generations`
    completions."""
    assert budget.pilot is not None
    size, pilot = budget.num_generations, budget.pilot
    pilots_RN = _all_rollouts(bandits[0], pilot)
    chances = [_chances(bandit, pilots_RN) for bandit in bandits]
    # The expected gradients (R, D) of each prompt after each pilot, by the number that follows.
    after: list[dict[int, Tensor]] = [{} for _ in bandits]
    for more in range(1, budget.max_generations - pilot + 1):
        factor_N = torch.ones(pilot + more, dtype=torch.float64) / size
        factor_N[pilot:] *= (size - pilot) / more
        terms = _Terms(estimator, beta, exact_kl, factor_N, pilot)
        others_RN = _all_rollouts(bandits[0], more)
        drawn_RN = _all_rollouts(bandits[0], pilot + more)
        for bandit, known in zip(bandits, after, strict=True):
            (gradient_RD,) = terms.gradients([bandit], drawn_RN)
            gradient_RRD = gradient_RD.unflatten(0, (len(pilots_RN), len(others_RN)))
            known[more] = torch.einsum("s,psd->pd", _chances(bandit, others_RN), gradient_RRD)
    means = [torch.zeros_like(known[1][0]) for known in after]
    for drawn in itertools.product(range(len(pilots_RN)), repeat=len(bandits)):
        chance = math.prod(c[number].item() for c, number in zip(chances, drawn, strict=True))
        rewards = [b.reward_S[pilots_RN[r]].tolist() for b, r in zip(bandits, drawn, strict=True)]
        sizes = _second_sizes(budget, rewards)
        for mean, known, number, more in zip(means, after, drawn, sizes, strict=True):
            mean += chance * known[more][number]
    equal = [measure(estimator, [b], size, beta, exact_kl=exact_kl)[0].gradient for b in bandits]
    exact = torch.cat(equal)
    return ((torch.cat(means) - exact).norm() / exact.norm()).item()


def _chances(bandit: TabularPolicy, sequence_RN: Tensor) -> Tensor:
    return bandit.logprob_S(bandit.logits)[sequence_RN].sum(1).exp()


def scored_rewards(group: Group) -> list[float]:
    """Return the rewards of a group without the missing ones."""
    return [reward for reward in group.rewards if reward is not None]


def _second_sizes(budget: GroupBudget, rewards: Sequence[list[float]]) -> list[int]:
    """The numbers of completions that follow pilots with these rewards. Earlier rewards of two
    other prompts are known. They differ between prompts only, so that the prior counts little."""
    estimate = RewardEstimate([""] * (len(rewards) + 2), half_life=1.0)
    known = enumerate(([0.3] * 40, [0.7] * 40), start=len(rewards))
    estimate.add([RewardedPrompt(number, 1.0, some) for number, some in known])
    rows = range(len(rewards) + 2)
    sampler = VarianceSampler(rows, estimate, scored_rewards, seed=0, floor=1.0)
    sampler.budget = budget
    return sampler.second_sizes(
        [Group(Prompt(row, [0], ""), [], [], [*some]) for row, some in enumerate(rewards)]
    )


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
