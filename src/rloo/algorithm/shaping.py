"""From scored groups to the samples that the loss counts, with their shaped rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rloo.algorithm import objective
from rloo.algorithm.adaptive import Adaptive
from rloo.config.config import RLOOConfig
from rloo.types import Completion, Group, Sample


def countable_samples(
    groups: Sequence[Group], config: RLOOConfig, past: Adaptive | None = None
) -> list[Sample]:
    """The completions that the loss counts, with shaped rewards: those that were scored, and if
    there is a group statistic, only those in groups with at least two scores. `past` is needed for
    a mean or deviation over earlier rollouts."""
    smallest = 2 if "group" in (config.mean_level, config.std_level) else 1
    found = []
    for number, group in enumerate(groups):
        scored = [(index, r) for index, r in enumerate(group.rewards) if r is not None]
        if len(scored) >= smallest:
            found += [(number, index, group, reward) for index, reward in scored]
    rewards = [_shape(r, group.completions[index], config) for _, index, group, r in found]
    return [
        Sample(
            key=(number, index),
            prompt_ids=group.prompt.token_ids,
            token_ids=group.completions[index].token_ids,
            engine_logprobs=group.completions[index].policy_logprobs,
            reward=reward,
            truncated=group.completions[index].finish == "length",
            sampling_logprobs=group.completions[index].sampling_logprobs,
            pixels=group.prompt.pixels,
        )
        for (number, index, group, _), reward in zip(
            found, _relate(rewards, config, past), strict=True
        )
    ]


def shaped_rewards(groups: Sequence[Group], config: RLOOConfig) -> list[float]:
    """All rewards of a rollout, without missing ones, after `_shape`."""
    return [
        _shape(reward, completion, config)
        for group in groups
        for reward, completion in zip(group.rewards, group.completions, strict=True)
        if reward is not None
    ]


def _shape(reward: float, completion: Completion, config: RLOOConfig) -> float:
    """Apply bias, scaling (in AReaL's order), missing-EOS penalty and clipping to a reward."""
    reward = (reward + config.reward_bias) * config.reward_scaling
    if completion.finish == "length":
        reward -= config.missing_eos_penalty or 0.0
    if config.reward_clip_range is not None:
        low, high = config.reward_clip_range
        reward = min(max(reward, low), high)
    return reward


def _relate(rewards: list[float], config: RLOOConfig, past: Adaptive | None) -> list[float]:
    """Normalise rewards by their rollout or by earlier ones (`normalize_rewards`), or subtract the
    running mean (`mean_level` running)."""
    if config.normalize_rewards == "batch":
        values = torch.tensor(rewards, dtype=torch.float64)
        return objective.standardise(values, epsilon=config.advantage_epsilon).tolist()
    if config.normalize_rewards == "running":
        # The first rollout is not normalised: its own statistics would bias it.
        return rewards if past is None else past.past.standardise(rewards)
    if config.mean_level == "running" and past is not None and past.decayed_mean is not None:
        return [reward - past.decayed_mean for reward in rewards]
    return rewards
