"""Completions to scored groups, and groups to the samples that the update learns from.

Knows nothing of log-probs, advantages, optimizers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rloo.algorithm import objective
from rloo.algorithm.adaptive import Adaptive
from rloo.config.config import RLOOConfig
from rloo.data.images import text_of
from rloo.model.batch import Sample
from rloo.rewards import RewardSet
from rloo.types import Completion, Group, Prompt, Text


def score(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    rewards: RewardSet,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: Any = None,
    learn: bool = True,
) -> tuple[list[Group], dict[str, float]]:
    """Give every completion its rewards: one call of each function for the whole rollout. `learn`:
    see `RewardSet.score`."""
    repeated = [p for p, completions in zip(prompts, sampled, strict=True) for _ in completions]
    flat = [c for completions in sampled for c in completions]
    decoded = tokenizer.batch_decode([c.token_ids for c in flat], skip_special_tokens=True)
    texts = [_as_text(p, text) for p, text in zip(repeated, decoded, strict=True)]
    names = list(dict.fromkeys(name for p in prompts for name in p.columns))
    scores = rewards.score(
        [p.content for p in repeated],
        texts,
        [c.token_ids for c in flat],
        {name: [p.columns.get(name) for p in repeated] for name in names},
        trainer_state,
        learn=learn,
    )
    groups, start = [], 0
    for prompt, completions in zip(prompts, sampled, strict=True):
        part = slice(start, start + len(completions))
        groups.append(
            Group(
                prompt=prompt,
                completions=list(completions),
                texts=texts[part],
                rewards=scores.totals[part],
                scores={name: values[part] for name, values in scores.by_function.items()},
                extras={name: values[part] for name, values in scores.extras.items()},
            )
        )
        start += len(completions)
    return groups, scores.metrics


def _as_text(prompt: Prompt, text: str) -> Text:
    """Conversations are answered by a message, strings by a string (TRL's convention)."""
    if isinstance(prompt.content, str):
        return text
    last = prompt.content[-1]
    if last["role"] == "assistant":  # the completion continues the message that was begun
        text = text_of(last["content"]) + text
    return [{"role": "assistant", "content": text}]


def countable_samples(
    groups: Sequence[Group], config: RLOOConfig, past: Adaptive | None = None
) -> list[Sample]:
    """The completions that the loss counts, with their shaped rewards: scored, and where a group
    statistic is taken in groups with at least two scores. `past` is needed for a mean or a
    deviation of earlier rollouts."""
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
    """All rewards of a rollout after affine map, missing-EOS penalty and clipping; no missing."""
    return [
        _shape(reward, completion, config)
        for group in groups
        for reward, completion in zip(group.rewards, group.completions, strict=True)
        if reward is not None
    ]


def _shape(reward: float, completion: Completion, config: RLOOConfig) -> float:
    """Affine map (AReaL's order: bias first), missing-EOS penalty, clip: before KL and baseline."""
    reward = (reward + config.reward_bias) * config.reward_scaling
    if completion.finish == "length":
        reward -= config.missing_eos_penalty or 0.0
    if config.reward_clip_range is not None:
        low, high = config.reward_clip_range
        reward = min(max(reward, low), high)
    return reward


def _relate(rewards: list[float], config: RLOOConfig, past: Adaptive | None) -> list[float]:
    """Rewards in relation to their rollout or to those before it (`normalize_rewards`,
    `mean_level` running)."""
    if config.normalize_rewards == "batch":
        values = torch.tensor(rewards, dtype=torch.float64)
        return objective.standardise(values, epsilon=config.advantage_epsilon).tolist()
    if config.normalize_rewards == "running":
        # The first rollout is left as it is: its own statistics would bias it.
        return rewards if past is None else past.past.standardise(rewards)
    if config.mean_level == "running" and past is not None and past.decayed_mean is not None:
        return [reward - past.decayed_mean for reward in rewards]
    return rewards
