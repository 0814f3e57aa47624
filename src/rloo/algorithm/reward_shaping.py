"""From scored groups to training samples with shaped rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rloo.algorithm.baselines import whiten
from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.kl_controller import KLController
from rloo.algorithm.regression import pool_of
from rloo.config.config import RLOOConfig
from rloo.rewards.reward_function import LARGEST
from rloo.types import LEAVE_ONE_OUT, Coefficients, Completion, Group, Rollout, Sample


def make_training_samples(
    rollout: Rollout, config: RLOOConfig, past: KLController | None = None
) -> list[Sample]:
    """Return the training samples of a rollout, with shaped rewards. They are the scored
    completions of groups that have enough scores for the estimator (in the pilot, if there is one).
    If the preset counts all completions, the other completions are included with the reward NaN.
    `past` is needed for a mean, deviation or regression over earlier rollouts."""
    estimator = load_estimator(config)
    smallest = estimator.smallest_group
    found: list[tuple[Sample, Completion]] = []
    begin = 0
    for number, group in enumerate(rollout.groups):
        # The baselines of a pilot are computed among the pilot.
        scores = group.rewards[: group.prompt.pilot]
        enough = sum(reward is not None for reward in scores) >= smallest
        fitted = LEAVE_ONE_OUT
        if past is not None and estimator.reads_coefficients:
            fitted = past.regression.coefficients(pool_of(group.prompt, config))
        for sample, completion in _samples(group, number, begin, rollout.version, config, fitted):
            if not math.isnan(sample.reward) and enough:
                found.append((sample, completion))
            elif config.loss_form.all_completions and sample.num_trained:  # else it has no loss
                found.append((replace(sample, reward=math.nan), completion))
        begin += len(group.completions)
    rewards = [_shaped(sample.reward, completion, config) for sample, completion in found]
    if too_large := [reward for reward in rewards if abs(reward) > LARGEST]:
        raise ValueError(
            f"a shaped reward is {too_large[0]:g}, beyond float32 (reward_scaling, reward_bias, "
            "missing_eos_penalty)"
        )
    related = _normalize_rewards(rewards, config, past)
    return [replace(s, reward=r) for (s, _), r in zip(found, related, strict=True)]


def _samples(
    group: Group,
    number: int,
    begin: int,
    version: int,
    config: RLOOConfig,
    coefficients: Coefficients,
) -> Iterator[tuple[Sample, Completion]]:
    """Yield the completions of group `number`; its first completion has index `begin`."""
    prompt, both = group.prompt, zip(group.completions, group.rewards, strict=True)
    for index, (completion, reward) in enumerate(both):
        sample = Sample(
            key=(number, index),
            place=begin + index,
            weight_versions=completion.weight_versions or ((version, len(completion.token_ids)),),
            prompt_ids=prompt.token_ids,
            token_ids=completion.token_ids,
            policy_logprobs=completion.policy_logprobs,
            reward=math.nan if reward is None else reward,
            truncated=completion.finish == "length",
            behavior_logprobs=completion.behavior_logprobs,
            pixels=prompt.pixels,
            trained=completion.trained,
            weight=prompt.completion_weight(config.num_generations, index),
            pilot=index < (prompt.pilot or 0),
            coefficients=coefficients,
        )
        yield sample, completion


def shaped_rewards(groups: Sequence[Group], config: RLOOConfig) -> list[float]:
    """Return the shaped rewards of all scored completions."""
    return [
        _shaped(reward, completion, config)
        for group in groups
        for reward, completion in zip(group.rewards, group.completions, strict=True)
        if reward is not None
    ]


def _shaped(reward: float, completion: Completion, config: RLOOConfig) -> float:
    """Apply bias and scaling (in this order, as in AReaL), missing-EOS penalty and clipping."""
    reward = (reward + config.reward_bias) * config.reward_scaling
    if completion.finish == "length":
        reward -= config.missing_eos_penalty or 0.0
    if config.reward_clip_range is not None:
        low, high = config.reward_clip_range
        reward = min(max(reward, low), high)
    return reward


def _normalize_rewards(
    rewards: list[float], config: RLOOConfig, past: KLController | None
) -> list[float]:
    """Normalise rewards with mean and deviation of their rollout ("batch") or of earlier rollouts
    ("running"), or subtract the running mean."""
    if config.normalize_rewards == "batch":
        values = torch.tensor(rewards, dtype=torch.float64)
        scaled = whiten(values, epsilon=config.advantage_epsilon)
        return torch.where(values.isnan(), values, scaled).tolist()
    if config.normalize_rewards == "running":
        # The first rollout is not normalised: its own statistics would bias it.
        return rewards if past is None else past.past.standardise(rewards)
    if config.mean_level == "running" and past is not None and past.decayed_mean is not None:
        return [reward - past.decayed_mean for reward in rewards]
    return rewards


def has_reward_variance(group: Group, config: RLOOConfig) -> bool:
    """Return whether the shaped rewards of a group differ."""
    return len(set(shaped_rewards([group], config))) > 1
