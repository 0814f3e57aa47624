"""The probability ratio and the KL estimate of each token, from two log-probs, and whether the loss
has a KL term."""

from __future__ import annotations

import torch
from torch import Tensor

from rloo.config.config import RLOOConfig

# exp(20) is 5e8, far outside every clipping range and well within float32. Without a bound a ratio
# could overflow to infinity, and infinity times an advantage of 0 is NaN.
MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with the log-ratio bounded by MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    policy_T: Tensor, reference_T: Tensor, *, estimator: str = "k1", clip: float | None = None
) -> Tensor:
    """An estimate of KL(policy || reference) for each sampled token, in nats: (T,).

    With x = log policy - log reference, k1 is x, k2 is x^2 / 2 and k3 is exp(-x) - 1 + x (Schulman
    2020). All three are differentiable. `clip` bounds the estimate to [-clip, clip]. Raises
    ValueError for an unknown `estimator`.
    """
    estimate = x = policy_T - reference_T
    if estimator == "k2":
        estimate = x**2 / 2
    elif estimator == "k3":
        # x is bounded in both terms: else the linear term would push away from the reference.
        x = x.clamp(min=-MAX_LOG_RATIO)
        # expm1 keeps the digits that exp(-x) - 1 loses for small x.
        estimate = torch.expm1(-x) + x
    elif estimator != "k1":
        raise ValueError(f"kl_estimator is {estimator!r}; it must be k1, k2 or k3")
    return estimate if clip is None else estimate.clamp(-clip, clip)


def has_kl_term(config: RLOOConfig, beta: float) -> bool:
    """Return whether the loss has a KL term: for a KL in the loss, and for any exact KL."""
    return beta != 0 and (config.kl_placement == "loss" or config.kl_estimator == "exact")
