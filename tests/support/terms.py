"""What the credit and update stages take, made from options alone."""

from rloo.algorithm.advantages import Terms
from rloo.config.batches import batches_of


def terms_of(config):
    return Terms(config, batches_of(config, world_size=1), config.beta)
