"""Scored completions to advantages: the KL penalty, the baseline, the scale, in the order of TRL.

What follows from the update's own forward pass is left to it. Knows nothing of optimizers, steps
or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rloo.algorithm import objective
from rloo.algorithm.chosen import advantages, chosen_estimator
from rloo.algorithm.estimators import Returns
from rloo.config.config import RLOOConfig
from rloo.model.batch import MicroBatch, exceeds, split
from rloo.model.policy import Policy
from rloo.types import Sample

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Credit:
    """What is known before the update. `None` means that the update's own forward pass gives it:
    in the first optimizer step "old" is "now", and no second pass over the policy is made.

    The advantages of a completion are one number, or with token ratios one for each token.
    """

    advantages: dict[Key, Tensor] | None
    old_logprobs: dict[Key, Tensor] | None
    stats: dict[str, float] = field(default_factory=dict)

    def old_logprobs_of(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """(T,): as stored, or `now` where nothing had to be."""
        if self.old_logprobs is None:
            return now
        return torch.cat([self.old_logprobs[key] for key in batch.keys])

    def has_signal(self, key: Key) -> bool:
        """False where the advantages are known to be exactly 0."""
        return self.advantages is None or bool(self.advantages[key].any())


@dataclass(slots=True)
class FirstPass:
    """What the first step on a whole rollout finds out in passing and later steps on it need."""

    advantages: dict[Key, Tensor] = field(default_factory=dict)
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)

    def see(self, batch: MicroBatch, logprobs: Tensor, advantages: Tensor) -> None:
        self.advantages.update(_by_key(batch.keys, batch.lengths, advantages))
        self.old_logprobs.update(zip(batch.keys, logprobs.split(batch.lengths), strict=True))

    def complete(self, given: Credit, metrics: Mapping[str, float]) -> Credit:
        """`given` with what was missing; `metrics` are those of the step, whose KL it keeps."""
        stats = {name: metrics[name] for name in ("kl", "kl/sequence") if name in metrics}
        advantages = self.advantages if given.advantages is None else given.advantages
        return Credit(advantages, self.old_logprobs, stats)


def credit(samples: Sequence[Sample], policy: Policy, config: RLOOConfig) -> Credit:
    """Advantages and old log-probs, as far as they must be known before the first step.

    Without a KL penalty in the reward advantages follow from the rewards alone. With one, they need
    log-probs: a pass of their own is made only if the first step is on a part of the rollout, a
    statistic runs over the batch, or a group exceeds the token budget.
    """
    if not samples:
        return Credit({}, {})
    in_parts = config.steps_per_rollout() > config.num_iterations
    if not kl_in_reward(config) and not in_parts:
        return Credit(_sample_advantages(samples, {}, config), None)
    needs_pass = (
        in_parts
        or chosen_estimator(config).over_rollout
        or exceeds(samples, policy.max_tokens, packed=policy.packed)
    )
    if not needs_pass:
        return Credit(None, None)
    old: dict[Key, Tensor] = {}
    penalties: dict[Key, Tensor] = {}
    total = 0.0
    for part in split(samples, policy.max_tokens, whole_groups=False, packed=policy.packed):
        batch = policy.batch(part)
        logprobs = policy.score(batch)
        old.update(zip(batch.keys, logprobs.split(batch.lengths), strict=True))
        if kl_in_reward(config):
            reference = policy.reference_logprobs(batch)
            total += (logprobs - reference).sum().item()
            penalty = token_penalty(logprobs, reference, config).cpu()
            penalties.update(zip(batch.keys, penalty.split(batch.lengths), strict=True))
    stats = {}
    if kl_in_reward(config):
        num_tokens = sum(len(s.token_ids) for s in samples)
        stats = {"kl": total / num_tokens, "kl/sequence": total / len(samples)}
    return Credit(_sample_advantages(samples, penalties, config), old, stats)


def kl_in_reward(config: RLOOConfig) -> bool:
    """Whether advantages depend on the reference."""
    return config.beta != 0 and config.kl_placement != "loss"


def batch_advantages(
    batch: MicroBatch, logprobs: Tensor, reference: Tensor, config: RLOOConfig
) -> Tensor:
    """Advantages of a micro-batch of whole groups from its own forward pass: (N,), or (T,) with
    token ratios."""
    penalty = token_penalty(logprobs, reference, config)
    returns = Returns(batch.reward_N, penalty, batch.sequence_T, batch.group_N, batch.truncated_N)
    return advantages(returns, config).to(logprobs.dtype)


def token_penalty(logprobs: Tensor, reference: Tensor, config: RLOOConfig) -> Tensor:
    """What each token pays: beta times its KL estimate, (T,), float64, detached."""
    estimate = objective.kl_estimate(
        logprobs.detach().double(),
        reference.double(),
        estimator=config.kl_estimator,
        clip=config.kl_clip,
    )
    return config.beta * estimate


def _sample_advantages(
    samples: Sequence[Sample], penalties: Mapping[Key, Tensor], config: RLOOConfig
) -> dict[Key, Tensor]:
    """Advantages of a whole rollout; without `penalties` nothing is paid."""
    lengths = [len(s.token_ids) for s in samples]
    keys = [s.key for s in samples]
    if penalties:
        penalty = torch.cat([penalties[key] for key in keys])
    else:
        penalty = torch.zeros(sum(lengths), dtype=torch.float64)
    returns = Returns(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        penalty,
        torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor([s.key[0] for s in samples]),
        torch.tensor([s.truncated for s in samples]),
    )
    return _by_key(keys, lengths, advantages(returns, config))


def _by_key(keys: Sequence[Key], lengths: Sequence[int], values: Tensor) -> dict[Key, Tensor]:
    sizes = [1] * len(keys) if len(values) == len(keys) else list(lengths)
    return dict(zip(keys, values.split(sizes), strict=True))
