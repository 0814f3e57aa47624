"""Returns to advantages by the estimator that the options choose."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.algorithm.estimators import Returns, composed
from rloo.config.composed import composition_of
from rloo.config.config import RLOOConfig


def advantages(returns: Returns, config: RLOOConfig) -> Tensor:
    """(N,), or (T,) with token ratios; 0 for completions that are masked as truncated. All of
    `returns` count, and their groups are whole."""
    values = composed(returns, composition_of(config))
    masked = returns.truncated_N & config.mask_truncated_completions
    if config.importance_sampling_level == "token":
        values, masked = returns.per_token(values), masked[returns.sequence_T]
    return torch.where(masked, 0.0, values)


def needs_whole_rollout(config: RLOOConfig) -> bool:
    """Whether advantages follow from the whole rollout only, not from each group alone."""
    return composition_of(config).over_rollout
