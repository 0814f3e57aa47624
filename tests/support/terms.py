"""What the stages of the method take, made from options or groups alone."""

from rloo.algorithm.advantages import Terms
from rloo.config.batches import batches_of
from rloo.types import Rollout


def terms_of(config):
    return Terms(config, batches_of(config, world_size=1), config.beta)


def advantages(returns, config):
    return terms_of(config).advantages(returns)


def rollout_of(groups):
    return Rollout(groups, metrics={}, num_tokens=0, version=0, position={}, epoch=0.0)
