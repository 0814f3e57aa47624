"""What the stages of the method take, made from options or groups alone."""

import random
from typing import Any

import torch

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.loss_context import LossContext
from rloo.config.batch_sizes import batches_of
from rloo.types import Rollout


def terms_of(config):
    return LossContext(config, batches_of(config, world_size=1), config.beta)


def advantages(returns, config):
    return terms_of(config).advantages(returns)


def rollout_of(groups):
    return Rollout(groups, metrics={}, num_tokens=0, version=0, position={}, epoch=0.0)


def two_groups(rewards, lengths):
    """Returns of two groups of four completions without penalties, all of them ended."""
    sequence_T = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    return EstimatorInput(
        torch.tensor(rewards, dtype=torch.float64),
        torch.zeros(len(sequence_T), dtype=torch.float64),
        sequence_T,
        torch.tensor([0] * 4 + [1] * 4),
        torch.zeros(8, dtype=torch.bool),
    )


def double(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_returns(seed: int, *, kl: bool = True, norms: bool = False) -> EstimatorInput:
    """Ragged groups of 2 to 5 completions of 1 to 6 tokens; rewards with ties."""
    rng = random.Random(seed)
    sizes = [rng.randint(2, 5) for _ in range(rng.randint(1, 5))]
    lengths = torch.tensor([rng.randint(1, 6) for _ in range(sum(sizes))])
    return EstimatorInput(
        double([rng.choice([0.0, 1.0, rng.random()]) for _ in lengths]),
        double([kl * rng.gauss(0, 0.1) for _ in range(int(lengths.sum()))]),
        torch.arange(len(lengths)).repeat_interleave(lengths),
        torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        torch.tensor([rng.random() < 0.3 for _ in lengths]),
        double([rng.uniform(0, 2) for _ in range(int(lengths.sum()))]) if norms else None,
        None,
        double([[rng.gauss(0, 0.3) for _ in range(2)] for _ in lengths]) if norms else None,
    )


def changed(returns: EstimatorInput, index: int) -> EstimatorInput:
    """The same returns, except for all that belongs to completion `index`: it has another reward,
    length, KL penalty and score norms, and is truncated or not."""
    length_N = returns.length_N.long()
    length_N[index] = length_N[index] % 6 + 1
    sequence_T = torch.arange(len(length_N)).repeat_interleave(length_N)

    def spread(values):
        parts = list(values.split(returns.length_N.long().tolist()))
        parts[index] = torch.linspace(0.3, 1.7, int(length_N[index])).double()
        return torch.cat(parts)

    reward_N, truncated_N = returns.reward_N.clone(), returns.truncated_N.clone()
    reward_N[index] += 2.5
    truncated_N[index] = ~truncated_N[index]
    norms = returns.score_norm_T
    return EstimatorInput(
        reward_N,
        spread(returns.penalty_T),
        sequence_T,
        returns.group_N,
        truncated_N,
        None if norms is None else spread(norms),
        returns.pilot_N,
        returns.coefficient_N2,
    )
