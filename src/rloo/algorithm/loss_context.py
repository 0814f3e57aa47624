"""The options, the batch arithmetic and the present KL coefficient, as the loss uses them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import LoadedEstimator, load_estimator
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig


@dataclass(frozen=True)
class LossContext:
    """The inputs of a rollout's loss: the options, the batch arithmetic, and `beta`, the present KL
    coefficient (which `kl_kwargs.target` adapts)."""

    config: RLOOConfig
    batches: BatchSizes
    beta: float

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages depend on the reference."""
        return self.beta != 0 and not self.kl_in_loss

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term of its own."""
        return self.beta != 0 and self.config.kl_placement == "loss"

    @cached_property
    def estimator(self) -> LoadedEstimator:
        """Looked up once, since it may be a user's. Raises ValueError as `chosen_estimator`."""
        return load_estimator(self.config)

    def watched(self, truncated_N: Tensor) -> Tensor:
        """bool (N,): which completions the metrics kl and entropy are means over. All, but where
        those masked as truncated pay no KL (as in TRL), these are left out."""
        pay = (self.config.estimator_kwargs or {}).get("kl_of_truncated", True)
        return ~truncated_N | (pay or not self.config.mask_truncated_completions)

    def advantages(self, returns: EstimatorInput, *, all_scored: bool = False) -> Tensor:
        """(N,), or (T,) with token ratios; 0 for completions that are masked as truncated and for
        those without a reward (NaN), which no estimator sees, unless `all_scored`. Groups are
        whole. Raises ValueError for an estimator that fails or returns what is no advantage."""
        level, scored_N = self.config.importance_sampling_level, ~returns.reward_N.isnan()
        if not all_scored and not scored_N.all():
            scored = scored_N[returns.sequence_T] if level == "token" else scored_N
            found = torch.zeros(scored.shape, dtype=torch.float64, device=scored.device)
            if scored.any():
                found[scored] = self.advantages(returns.select(scored_N))
            return found
        values = self.estimator.compute(returns)
        masked = returns.truncated_N & self.config.mask_truncated_completions
        if level == "token":
            values, masked = returns.per_token(values), masked[returns.sequence_T]
        elif len(values) != returns.num_completions:
            raise ValueError(
                f"{self.estimator} returned one advantage for each of {len(values)} tokens, and "
                f"importance_sampling_level is {level}, one ratio for all tokens of a completion "
                "(importance_sampling_level token)"
            )
        return torch.where(masked, 0.0, values)
