"""What a run learns about itself as it goes: past rewards, and how strongly KL must be penalised.

Plain numbers with a state that goes into checkpoints. Knows nothing of tensors or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rloo.config import RLOOConfig


@dataclass
class Adaptive:
    """`beta` is the KL coefficient now. `decayed_mean` follows the rollouts' mean rewards; `count`,
    `mean` and `squares` are those of all rewards of earlier rollouts (Welford 1962)."""

    beta: float
    decayed_mean: float | None = None
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)

    def apply(self, config: RLOOConfig) -> RLOOConfig:
        """`config` as it holds for the next rollout."""
        return config if config.kl_target is None else replace(config, beta=self.beta)

    def standardise(self, rewards: Sequence[float]) -> list[float]:
        """Rewards less the mean of earlier ones, over their deviation. The first rollout, before
        which there is nothing, is left as it is: its own statistics would bias it."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return [(r - self.mean) / (deviation or 1.0) for r in rewards]

    def see_rewards(self, rewards: Sequence[float], decay: float) -> None:
        """Take a rollout's rewards into the past; afterwards, so that no reward is part of its own
        baseline."""
        if not rewards:
            return
        average = fmean(rewards)
        before = average if self.decayed_mean is None else self.decayed_mean
        self.decayed_mean = decay * before + (1 - decay) * average
        for reward in rewards:
            self.count += 1
            difference = reward - self.mean
            self.mean += difference / self.count
            self.squares += difference * (reward - self.mean)

    def see_kl(self, kl: float, completions: int, config: RLOOConfig) -> None:
        """Move `beta` towards `kl_target`: by at most 20 % in `kl_horizon` completions (Ziegler et
        al. 2019, arXiv 1909.08593, section 2.2). `kl` is in nats per token."""
        if config.kl_target is not None:
            error = min(max(kl / config.kl_target - 1.0, -0.2), 0.2)
            self.beta *= 1.0 + error * completions / config.kl_horizon
