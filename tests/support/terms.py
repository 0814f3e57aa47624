"""What the stages of the method take, made from options or groups alone."""

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
