"""The names of the estimators, and the settings of `composed`. The estimators are in
`rloo.algorithm.estimators`."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Any, Literal

from rloo.config.fields import coerce, suggest
from rloo.config.options import TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorConfig:
    """The settings of the estimator `composed`; the defaults are REINFORCE Leave-One-Out.

    The first fields are options. The other fields are arguments (`estimator_kwargs`), which only
    some systems use. With `mean_level` running, the running mean is subtracted from the rewards
    before the estimator receives the rewards.
    """

    kl_placement: Literal["reward", "reward_to_go", "loss"] = "reward"
    mean_level: Literal["group", "batch", "running", "none"] = "group"
    mean_leave1out: bool = True
    std_level: Literal["group", "batch", "none"] = "none"
    advantage_epsilon: float = 1e-4
    normalize_advantages: bool = False
    mask_truncated_completions: bool = False

    # Clip advantages to [low, high], before any KL penalty outside the baseline.
    advantage_clip_range: tuple[float, float] | None = None
    # Decay of the running mean (with `mean_level` running).
    running_decay: float = 0.95
    # Subtract the KL before the baseline is computed, not afterwards.
    kl_in_baseline: bool = True
    # Subtract the KL also from rewards of completions that `mask_truncated_completions` masks.
    kl_of_truncated: bool = True
    # Elements of the baseline's mean. With `tokens`, leave-one-out leaves out one token only.
    mean_over: Literal["completions", "tokens"] = "completions"
    # Leave the completion itself out of the standard deviation.
    std_leave1out: bool = False
    # Add `advantage_epsilon` to the variance, not to the standard deviation.
    epsilon_in_variance: bool = False
    # Elements of the mean and deviation of `normalize_advantages`.
    normalize_over: Literal["completions", "tokens"] = "completions"

    @property
    def over_rollout(self) -> bool:
        """Whether a mean or deviation is over all groups of the rollout."""
        return self.normalize_advantages or "batch" in (self.mean_level, self.std_level)

    @property
    def smallest_group(self) -> int:
        """The number of scored completions that a group needs to be trained on."""
        return 2 if "group" in (self.mean_level, self.std_level) else 1


PAPER = EstimatorConfig()


def running_decay_of(config: TrainingOptions) -> float:
    """The decay of the running mean of rewards, for any estimator."""
    composed = config.estimator == "composed"
    return estimator_config_of(config).running_decay if composed else PAPER.running_decay


# Argument -> default.
ARGUMENTS: dict[str, Any] = {
    part.name: part.default
    for part in fields(EstimatorConfig)
    if not hasattr(TrainingOptions, part.name)
}
_HINTS = typing.get_type_hints(EstimatorConfig)


def estimator_config_of(config: TrainingOptions) -> EstimatorConfig:
    """The settings of `composed` from options and arguments of `config`. Raises ValueError for an
    unknown argument, with the most similar known argument, and for a value of a wrong type or
    range."""
    given = config.estimator_kwargs or {}
    for name in given:
        if name not in ARGUMENTS:
            raise ValueError(
                f"unknown argument {name} of the estimator composed{suggest(name, ARGUMENTS)} "
                f"(estimator_kwargs: {', '.join(ARGUMENTS)})"
            )
    values = {n: coerce(f"estimator_kwargs.{n}", _HINTS[n], value) for n, value in given.items()}
    bounds = values.get("advantage_clip_range")
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ValueError(
            f"estimator_kwargs.advantage_clip_range is ({bounds[0]}, {bounds[1]}); the first must "
            "be below the second"
        )
    if not 0 <= values.get("running_decay", 0) < 1:
        raise ValueError(
            f"estimator_kwargs.running_decay is {values['running_decay']}; it must be at least 0 "
            "and below 1"
        )
    options = {name: getattr(config, name) for name in _HINTS if name not in ARGUMENTS}
    return EstimatorConfig(**options, **values)
