"""Scored completions to advantages: KL penalty, baseline, scale, in that order.

If the update computes the log-probs anyway (the default), this stage is skipped and `micro_loss`
calls `batch_advantages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from rloo.algorithm import objective
from rloo.config.batches import Batches
from rloo.config.config import RLOOConfig
from rloo.model.batch import MicroBatch, exceeds, split
from rloo.model.policy import Policy
from rloo.types import Sample

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Terms:
    """The inputs of a rollout's loss: the options, the batch arithmetic, and `beta`, the present KL
    coefficient (which `kl_target` adapts)."""

    config: RLOOConfig
    batches: Batches
    beta: float

    @property
    def kl_in_reward(self) -> bool:
        """Whether advantages depend on the reference."""
        return self.beta != 0 and self.config.kl_placement != "loss"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term of its own."""
        return self.beta != 0 and self.config.kl_placement == "loss"


@dataclass(frozen=True, slots=True)
class Credit:
    """Advantages and log-probs known before the update. None means that the update's own forward
    pass computes them: in the first optimizer step the policy has not changed since sampling, so no
    second pass over it is needed.

    The advantage of a completion is one number, or with token ratios one number per token.
    """

    advantages: dict[Key, Tensor] | None
    old_logprobs: dict[Key, Tensor] | None
    stats: dict[str, float] = field(default_factory=dict)

    def old_logprobs_of(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """The log-probs (T,) of the policy before the rollout's first step: as stored, or `now`."""
        if self.old_logprobs is None:
            return now
        return torch.cat([self.old_logprobs[key] for key in batch.keys])

    def has_signal(self, key: Key) -> bool:
        """False if the advantages are known to be exactly 0."""
        return self.advantages is None or bool(self.advantages[key].any())


@dataclass(slots=True)
class FirstPass:
    """Records what the first step on a whole rollout computes and later steps on it need."""

    advantages: dict[Key, Tensor] = field(default_factory=dict)
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)

    def see(self, batch: MicroBatch, logprobs: Tensor, advantages: Tensor) -> None:
        self.advantages.update(_by_key(batch.keys, batch.lengths, advantages))
        self.old_logprobs.update(zip(batch.keys, logprobs.split(batch.lengths), strict=True))

    def complete(self, given: Credit, metrics: Mapping[str, float]) -> Credit:
        """`given` with its missing parts; the KL is taken from the step's `metrics`."""
        stats = {name: metrics[name] for name in ("kl", "kl/sequence") if name in metrics}
        advantages = self.advantages if given.advantages is None else given.advantages
        return Credit(advantages, self.old_logprobs, stats)


def credit(samples: Sequence[Sample], policy: Policy, terms: Terms) -> Credit:
    """Compute the advantages and log-probs that must be known before the first step.

    Without a KL penalty in the reward, advantages follow from the rewards alone. With one they need
    log-probs, for which there is a separate pass only if the first step is on a part of the
    rollout, if a statistic runs over the batch, or if a group exceeds the token budget.
    """
    if not samples:
        return Credit({}, {})
    config, in_parts = terms.config, terms.batches.parts_per_rollout > 1
    if not terms.kl_in_reward and not in_parts:
        return Credit(_sample_advantages(samples, {}, config), None)
    needs_pass = (
        in_parts
        or _whole_batch(config)
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
        if terms.kl_in_reward:
            reference = policy.reference_logprobs(batch)
            total += (logprobs - reference).sum().item()
            penalty = token_penalty(logprobs, reference, terms).cpu()
            penalties.update(zip(batch.keys, penalty.split(batch.lengths), strict=True))
    stats = {}
    if terms.kl_in_reward:
        num_tokens = sum(len(s.token_ids) for s in samples)
        stats = {"kl": total / num_tokens, "kl/sequence": total / len(samples)}
    return Credit(_sample_advantages(samples, penalties, config), old, stats)


def batch_advantages(
    batch: MicroBatch, logprobs: Tensor, reference: Tensor, terms: Terms
) -> Tensor:
    """The advantages of a micro-batch of whole groups, from its own forward pass: (N,), or (T,)
    with token ratios."""
    penalty = token_penalty(logprobs, reference, terms)
    values = advantages(
        batch.reward_N, penalty, batch.sequence_T, batch.group_N, batch.truncated_N, terms.config
    )
    return values.to(logprobs.dtype)


def token_penalty(logprobs: Tensor, reference: Tensor, terms: Terms) -> Tensor:
    """The KL penalty of each token: beta times its KL estimate, (T,), float64, detached."""
    estimate = objective.kl_estimate(
        logprobs.detach().double(),
        reference.double(),
        estimator=terms.config.kl_estimator[:2],
        clip=terms.config.kl_clip,
    )
    return terms.beta * estimate


def _sample_advantages(
    samples: Sequence[Sample], penalties: Mapping[Key, Tensor], config: RLOOConfig
) -> dict[Key, Tensor]:
    """The advantages of a whole rollout; without `penalties` there is no KL penalty."""
    lengths = [len(s.token_ids) for s in samples]
    keys = [s.key for s in samples]
    if penalties:
        penalty = torch.cat([penalties[key] for key in keys])
    else:
        penalty = torch.zeros(sum(lengths), dtype=torch.float64)
    values = advantages(
        torch.tensor([s.reward for s in samples], dtype=torch.float64),
        penalty,
        torch.arange(len(samples)).repeat_interleave(torch.tensor(lengths)),
        torch.tensor([s.key[0] for s in samples]),
        torch.tensor([s.truncated for s in samples]),
        config,
    )
    return _by_key(keys, lengths, values)


def advantages(
    reward_N: Tensor,
    penalty_T: Tensor,
    sequence_T: Tensor,
    group_N: Tensor,
    truncated_N: Tensor,
    config: RLOOConfig,
) -> Tensor:
    """Advantages from shaped rewards and token penalties (beta times KL): (N,), or (T,) with token
    ratios. Completions lie one after another; all of them count, and groups are whole."""
    masked_N = truncated_N & config.mask_truncated_completions
    if not config.kl_of_truncated:
        penalty_T = torch.where(masked_N[sequence_T], 0.0, penalty_T)
    size = len(reward_N)
    whole_N = objective.sum_by(penalty_T, sequence_T, size)
    to_go = config.kl_placement == "reward_to_go"
    paid_T = objective.return_to_go(penalty_T, sequence_T, size) if to_go else whole_N[sequence_T]
    result = _above_baseline(
        reward_N, whole_N, paid_T, sequence_T=sequence_T, group_N=group_N, config=config
    )

    def per_token(values: Tensor) -> Tensor:
        # If the sizes are equal, every completion is a single token.
        return values if len(values) == len(sequence_T) else values[sequence_T]

    if config.advantage_clip_range is not None:
        result = result.clamp(*config.advantage_clip_range)
    if not config.kl_in_baseline:
        by_token = to_go or config.mean_over == "tokens"
        result = per_token(result) - paid_T if by_token else result - whole_N
    if config.importance_sampling_level == "token":
        over_tokens = config.normalize_over == "tokens"
        result = per_token(_normalised(per_token(result) if over_tokens else result, config))
        return torch.where(masked_N[sequence_T], 0.0, result)
    return torch.where(masked_N, 0.0, _normalised(result, config))


def _above_baseline(
    reward_N: Tensor,
    whole_N: Tensor,
    paid_T: Tensor,
    *,
    sequence_T: Tensor,
    group_N: Tensor,
    config: RLOOConfig,
) -> Tensor:
    """(return - baseline) / deviation: (N,), or (T,) if it differs by token.

    `whole_N` is the penalty of each completion, `paid_T` that of each token and all later ones.
    """
    level = cast(Any, "none" if config.mean_level == "running" else config.mean_level)
    mean = {"mean_level": level, "mean_leave1out": config.mean_leave1out}
    if config.mean_over == "tokens":
        returns_T = reward_N[sequence_T] - (paid_T if config.kl_in_baseline else 0.0)
        return objective.centred(returns_T, group_N[sequence_T], **mean)
    returns_N = reward_N - whole_N if config.kl_in_baseline else reward_N
    factor_N = objective.scale(
        returns_N,
        group_N,
        std_level=config.std_level,
        std_leave1out=config.std_leave1out,
        epsilon=config.advantage_epsilon,
        epsilon_in_variance=config.epsilon_in_variance,
    )
    result = objective.centred(returns_N, group_N, **mean) * factor_N
    if config.kl_placement == "reward_to_go" and config.kl_in_baseline:
        # A token does not pay for the tokens before it.
        result = result[sequence_T] + (whole_N[sequence_T] - paid_T) * factor_N[sequence_T]
    return result


def _normalised(values: Tensor, config: RLOOConfig) -> Tensor:
    if not config.normalize_advantages:
        return values
    return objective.standardise(
        values,
        epsilon=config.advantage_epsilon,
        epsilon_in_variance=config.epsilon_in_variance,
    )


def _by_key(keys: Sequence[Key], lengths: Sequence[int], values: Tensor) -> dict[Key, Tensor]:
    sizes = [1] * len(keys) if len(values) == len(keys) else list(lengths)
    return dict(zip(keys, values.split(sizes), strict=True))


def _whole_batch(config: RLOOConfig) -> bool:
    return config.normalize_advantages or "batch" in (config.mean_level, config.std_level)
