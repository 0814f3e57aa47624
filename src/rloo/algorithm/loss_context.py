"""The options, batch sizes and current KL coefficient, as the loss uses them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rloo.algorithm.estimator_input import EstimatorInput
from rloo.algorithm.estimator_registry import LoadedEstimator, load_estimator
from rloo.algorithm.kl_estimate import has_kl_term
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig


@dataclass(frozen=True)
class LossContext:
    """The settings of a rollout's loss: the options, the batch sizes, and `beta`, the current KL
    coefficient (with `kl_kwargs.target` it changes during a run)."""

    config: RLOOConfig
    batches: BatchSizes
    beta: float

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages depend on the reference model."""
        return self.beta != 0 and self.config.kl_placement != "loss"

    @property
    def values_from_forward(self) -> bool:
        """Whether advantages depend on values of a forward pass (`rloo.algorithm.token_values`)."""
        return self.kl_in_reward or self.estimator.reads_score_norms

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return has_kl_term(self.config, self.beta)

    @cached_property
    def estimator(self) -> LoadedEstimator:
        """The estimator, loaded once. Raises ValueError as `load_estimator` does."""
        return load_estimator(self.config)

    def watched(self, truncated_N: Tensor) -> Tensor:
        """Return the mask, bool (N,), of the completions that the metrics kl and entropy include.
        The metrics leave out a truncated completion if it is masked and has no KL penalty (as in
        TRL), and include all others."""
        pay = (self.config.estimator_kwargs or {}).get("kl_of_truncated", True)
        return ~truncated_N | (pay or not self.config.mask_truncated_completions)

    def advantages(self, returns: EstimatorInput, *, all_scored: bool = False) -> Tensor:
        """Return advantages, (N,), or (T,) with token-level ratios. `returns` has whole groups.
        Truncated completions get 0 if they are masked. Completions without a reward (NaN) get 0 and
        are not passed to the estimator. `all_scored` states that every completion has a reward.
        Raises ValueError if the estimator fails or returns invalid advantages."""
        level, scored_N = self.config.importance_sampling_level, ~returns.reward_N.isnan()
        if not all_scored and not scored_N.all():
            scored = scored_N[returns.sequence_T] if level == "token" else scored_N
            found = torch.zeros(scored.shape, dtype=torch.float64, device=scored.device)
            if scored.any():
                found[scored] = self.advantages(returns.select(scored_N))
            return found
        values = self.estimator.advantages(returns)
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
