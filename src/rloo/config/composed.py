"""The estimator `composed` as a value: everything that it consists of, in the order of its options.

Knows nothing of tensors; `rloo.algorithm.estimators.composed` computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from rloo.config.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What `composed` is to compute; the defaults are REINFORCE Leave-One-Out.

    A mean of earlier rollouts is off the rewards already: `mean_level` is then none.
    """

    kl_placement: Literal["reward", "reward_to_go", "loss"] = "reward"
    kl_in_baseline: bool = True
    kl_of_truncated: bool = True
    mean_level: Literal["group", "batch", "running", "none"] = "group"
    mean_leave1out: bool = True
    mean_over: Literal["completions", "tokens"] = "completions"
    std_level: Literal["group", "batch", "none"] = "none"
    std_leave1out: bool = False
    advantage_epsilon: float = 1e-4
    epsilon_in_variance: bool = False
    advantage_clip_range: tuple[float, float] | None = None
    normalize_advantages: bool = False
    normalize_over: Literal["completions", "tokens"] = "completions"
    mask_truncated_completions: bool = False

    @property
    def over_rollout(self) -> bool:
        """Whether some statistic runs over all groups of the rollout."""
        return self.normalize_advantages or "batch" in (self.mean_level, self.std_level)

    @property
    def smallest_group(self) -> int:
        """The fewest scored completions of a group that counts."""
        return 2 if "group" in (self.mean_level, self.std_level) else 1


def composition_of(config: Options) -> Composition:
    """The composition that the options of `config` describe."""
    return Composition(**{part.name: getattr(config, part.name) for part in fields(Composition)})
