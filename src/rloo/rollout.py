"""Completions to scored groups, and groups to what the update needs: samples and their credit.

Rewards are computed here and advantages begin here; the update finishes them where they follow
from its own forward pass. Knows nothing of optimizers, steps or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloo import objective
from rloo.batch import MicroBatch, Sample, exceeds, split
from rloo.config import RLOOConfig
from rloo.policy import Policy
from rloo.rewards import RewardSet
from rloo.types import Completion, Group, Prompt, Text

Key = tuple[int, int]


def score(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Completion]],
    rewards: RewardSet,
    *,
    tokenizer: PreTrainedTokenizerBase,
    trainer_state: Any = None,
) -> tuple[list[Group], dict[str, float]]:
    """Give every completion its rewards: one call of each function for the whole rollout."""
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
        text = str(last["content"]) + text
    return [{"role": "assistant", "content": text}]


def countable_samples(groups: Sequence[Group], config: RLOOConfig) -> list[Sample]:
    """The completions that the loss counts: scored, in groups with at least two scores. Rewards are
    clipped here, before the KL penalty and the baseline."""
    samples = []
    for number, group in enumerate(groups):
        scored = {index: r for index, r in enumerate(group.rewards) if r is not None}
        if len(scored) < 2:
            continue
        rewards = torch.tensor(list(scored.values()), dtype=torch.float64)
        clipped = objective.clip_rewards(rewards, config.reward_clip_range).tolist()
        for index, reward in zip(scored, clipped, strict=True):
            completion = group.completions[index]
            samples.append(
                Sample(
                    key=(number, index),
                    prompt_ids=group.prompt.token_ids,
                    token_ids=completion.token_ids,
                    engine_logprobs=completion.policy_logprobs,
                    reward=reward,
                    truncated=completion.finish == "length",
                )
            )
    return samples


@dataclass(frozen=True, slots=True)
class Credit:
    """What is known before the update. `None` means that the update's own forward pass gives it:
    in the first optimizer step "old" is "now", and no second pass over the policy is made."""

    advantages: dict[Key, float] | None
    old_logprobs: dict[Key, Tensor] | None
    stats: dict[str, float] = field(default_factory=dict)

    def old_logprobs_of(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """(T,): as stored, or `now` where nothing had to be."""
        if self.old_logprobs is None:
            return now
        return torch.cat([self.old_logprobs[key] for key in batch.keys])


@dataclass(slots=True)
class FirstPass:
    """What the first step on a whole rollout finds out in passing and later steps on it need."""

    advantages: dict[Key, float] = field(default_factory=dict)
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)

    def see(self, batch: MicroBatch, logprobs: Tensor, advantages: Tensor) -> None:
        self.advantages.update(zip(batch.keys, advantages.tolist(), strict=True))
        self.old_logprobs.update(zip(batch.keys, logprobs.split(batch.lengths), strict=True))

    def complete(self, given: Credit, metrics: Mapping[str, float]) -> Credit:
        """`given` with what was missing; `metrics` are those of the step, whose KL it keeps."""
        stats = {name: metrics[name] for name in ("kl", "kl/sequence") if name in metrics}
        advantages = self.advantages if given.advantages is None else given.advantages
        return Credit(advantages, self.old_logprobs, stats)


def credit(samples: Sequence[Sample], policy: Policy, config: RLOOConfig) -> Credit:
    """Advantages and old log-probs, as far as they must be known before the first step.

    Without a KL penalty advantages follow from the rewards alone. With one, they need log-probs:
    a pass of their own is made only if the first step is on a part of the rollout, a statistic
    runs over the batch, or a group exceeds the token budget.
    """
    if not samples:
        return Credit({}, {})
    in_parts = config.steps_per_rollout() > config.num_iterations
    if config.beta == 0 and not in_parts:
        return Credit(_sample_advantages(samples, {}, config), None)
    needs_pass = (
        in_parts
        or _whole_batch(config)
        or exceeds(samples, policy.max_tokens, packed=policy.packed)
    )
    if not needs_pass:
        return Credit(None, None)
    old: dict[Key, Tensor] = {}
    kl: dict[Key, float] = {}
    for part in split(samples, policy.max_tokens, whole_groups=False, packed=policy.packed):
        batch = policy.batch(part)
        logprobs = policy.score(batch)
        old.update(zip(batch.keys, logprobs.split(batch.lengths), strict=True))
        if config.beta != 0:
            reference = policy.reference_logprobs(batch)
            kl_N = objective.sequence_kl(logprobs, reference, batch.sequence_T, batch.size)
            kl.update(zip(batch.keys, kl_N.tolist(), strict=True))
    stats = {}
    if config.beta != 0:
        num_tokens = sum(len(s.token_ids) for s in samples)
        stats = {"kl": sum(kl.values()) / num_tokens, "kl/sequence": sum(kl.values()) / len(kl)}
    return Credit(_sample_advantages(samples, kl, config), old, stats)


def batch_advantages(
    batch: MicroBatch, logprobs: Tensor, reference: Tensor, config: RLOOConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and KL (both (N,)) of a micro-batch of whole groups, from its own forward pass."""
    kl = objective.sequence_kl(logprobs, reference, batch.sequence_T, batch.size)
    values = _advantages(batch.reward_N, kl.double(), batch.group_N, batch.truncated_N, config)
    return values.to(logprobs.dtype), kl


def _sample_advantages(
    samples: Sequence[Sample], kl: Mapping[Key, float], config: RLOOConfig
) -> dict[Key, float]:
    """Advantages of a whole rollout; a completion that `kl` does not hold has none to pay."""
    values = _advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        torch.tensor([kl.get(s.key, 0.0) for s in samples], dtype=torch.float64),
        torch.tensor([s.key[0] for s in samples]),
        torch.tensor([s.truncated for s in samples]),
        config,
    )
    return dict(zip((s.key for s in samples), values.tolist(), strict=True))


def _advantages(
    reward_N: Tensor, kl_N: Tensor, group_N: Tensor, truncated_N: Tensor, config: RLOOConfig
) -> Tensor:
    """Clipped rewards and KL to advantages, all (N,) and float64."""
    values = objective.advantages(
        reward_N - config.beta * kl_N,
        group_N,
        mean_level=config.mean_level,
        mean_leave1out=config.mean_leave1out,
        std_level=config.std_level,
        normalize=config.normalize_advantages,
        epsilon=config.advantage_epsilon,
    )
    if config.mask_truncated_completions:
        values = torch.where(truncated_N, 0.0, values)
    return values


def _whole_batch(config: RLOOConfig) -> bool:
    return config.normalize_advantages or "batch" in (config.mean_level, config.std_level)
