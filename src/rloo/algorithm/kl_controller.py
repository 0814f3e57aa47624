"""Quantities that adapt during a run: statistics of past rewards, and the KL coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rloo.algorithm.regression import ReturnRegression
from rloo.config.config import RLOOConfig
from rloo.rewards.running_norm import RunningMoments


@dataclass
class KLController:
    """The adaptive KL coefficient and statistics of past rewards. `beta` is the current
    coefficient, `used_beta` is the coefficient of the last rollout. `decayed_mean` is a moving
    average of the rollouts' mean rewards; `past` are the moments of all earlier rewards;
    `regression` is fitted if the estimator reads its coefficients."""

    beta: float
    used_beta: float = field(init=False)
    decayed_mean: float | None = None
    past: RunningMoments = field(default_factory=RunningMoments)
    regression: ReturnRegression = field(default_factory=ReturnRegression)

    def __post_init__(self) -> None:
        self.used_beta = self.beta

    def state_dict(self) -> dict[str, Any]:
        """Return the full state as JSON values."""
        return {
            "beta": self.beta,
            "used_beta": self.used_beta,
            "decayed_mean": self.decayed_mean,
            "past": self.past.state_dict(),
            "regression": self.regression.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.beta, self.used_beta = state["beta"], state["used_beta"]
        self.decayed_mean = state["decayed_mean"]
        self.past.load_state_dict(state["past"])
        if "regression" in state:  # checkpoints of earlier versions have none
            self.regression.load_state_dict(state["regression"])

    def update_reward_stats(self, rewards: Sequence[float], decay: float) -> None:
        """Add the rewards of a rollout. Call this after they were used, so that no reward is part
        of its own baseline."""
        if rewards:
            average = fmean(rewards)
            before = average if self.decayed_mean is None else self.decayed_mean
            self.decayed_mean = decay * before + (1 - decay) * average
            self.past.update(rewards)

    def update_kl(self, kl: float, completions: int, config: RLOOConfig) -> None:
        """Adapt `beta` so that the KL approaches `kl_kwargs.target` (Ziegler et al. 2019, arXiv
        1909.08593, section 2.2). `beta` changes by at most 20 % per `horizon` completions. `kl` is
        in nats per token."""
        self.used_beta = self.beta
        control = config.kl_options
        if control.target is not None:
            error = min(max(kl / control.target - 1.0, -0.2), 0.2)
            self.beta *= 1.0 + error * completions / control.horizon
