"""Scored completions to advantages: KL penalty, baseline, scale, in that order.

Credit comes in two forms with one interface: `Stored`, where advantages are known before the
update, and `FromThisPass`, the default with a KL penalty, where the update's own forward pass gives
the log-probs that they follow from, so that no other pass over the policy is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rloo.algorithm import objective
from rloo.algorithm.chosen import advantages, chosen_estimator
from rloo.algorithm.estimators import Returns
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


@dataclass(slots=True)
class Stored:
    """Advantages that are known before the update: of each completion one number, or with token
    ratios one for each token. What a pass of its own has scored is in `old_logprobs` from the
    start; `stats` are that pass's metrics."""

    known: dict[Key, Tensor]
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    # What the update must do for it: micro-batches of whole groups, log-probs of the reference.
    needs_groups: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def has_signal(self, key: Key) -> bool:
        """False where the advantages are exactly 0."""
        return bool(self.known[key].any())

    def advantages(self, batch: MicroBatch, now: Tensor, reference: Tensor | None) -> Tensor:
        """Those of the batch's completions, (N,) or (T,), on the device and in the dtype of its
        log-probs `now` (T,)."""
        return torch.cat([self.known[key] for key in batch.keys]).to(now.device, now.dtype)

    def old(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """(T,): the log-probs that each completion had when it was first seen."""
        return _first_seen(self.old_logprobs, batch, now)

    def after_first_step(self, metrics: Mapping[str, float]) -> Stored:
        """The credit for the other steps on the same rollout."""
        return self


@dataclass(slots=True)
class FromThisPass:
    """Advantages that follow from the update's own forward pass: its first step sees the whole
    rollout in micro-batches of whole groups, and old is now."""

    terms: Terms
    known: dict[Key, Tensor] = field(default_factory=dict)
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    needs_groups: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    def has_signal(self, key: Key) -> bool:
        """True: nothing is known yet."""
        return True

    def advantages(self, batch: MicroBatch, now: Tensor, reference: Tensor | None) -> Tensor:
        """As `Stored.advantages`, made of `now` and `reference` (T,)."""
        assert reference is not None, "needs_reference"
        values = batch_advantages(batch, now, reference, self.terms)
        self.known.update(_by_key(batch.keys, batch.lengths, values))
        return values

    def old(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """As `Stored.old`."""
        return _first_seen(self.old_logprobs, batch, now)

    def after_first_step(self, metrics: Mapping[str, float]) -> Stored:
        """What was seen in passing, with the KL among the first step's `metrics`."""
        stats = {name: metrics[name] for name in ("kl", "kl/sequence") if name in metrics}
        return Stored(self.known, self.old_logprobs, stats)


Credit = Stored | FromThisPass


def assign(samples: Sequence[Sample], policy: Policy, terms: Terms) -> Credit:
    """Compute the advantages and log-probs that must be known before the first step.

    Without a KL penalty in the reward, advantages follow from the rewards alone. With one they need
    log-probs, for which there is a separate pass only if the first step is on a part of the
    rollout, if a statistic runs over the batch, or if a group exceeds the token budget.
    """
    if not samples:
        return Stored({})
    in_parts = terms.batches.parts_per_rollout > 1
    if not terms.kl_in_reward and not in_parts:
        return Stored(_sample_advantages(samples, {}, terms.config))
    needs_pass = (
        in_parts
        or chosen_estimator(terms.config).over_rollout
        or exceeds(samples, policy.max_tokens, packed=policy.packed)
    )
    return _from_own_pass(samples, policy, terms) if needs_pass else FromThisPass(terms)


def _from_own_pass(samples: Sequence[Sample], policy: Policy, terms: Terms) -> Stored:
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
        num_tokens = sum(s.num_trained for s in samples)
        stats = {"kl": total / num_tokens, "kl/sequence": total / len(samples)}
    return Stored(_sample_advantages(samples, penalties, terms.config), old, stats)


def _first_seen(seen: dict[Key, Tensor], batch: MicroBatch, now: Tensor) -> Tensor:
    parts = zip(batch.keys, now.split(batch.lengths), strict=True)
    return torch.cat([seen.setdefault(key, part) for key, part in parts])


def batch_advantages(
    batch: MicroBatch, logprobs: Tensor, reference: Tensor, terms: Terms
) -> Tensor:
    """The advantages of a micro-batch of whole groups, from its own forward pass: (N,), or (T,)
    with token ratios."""
    penalty = token_penalty(logprobs, reference, terms)
    returns = Returns(batch.reward_N, penalty, batch.sequence_T, batch.group_N, batch.truncated_N)
    return advantages(returns, terms.config).to(logprobs.dtype)


def token_penalty(logprobs: Tensor, reference: Tensor, terms: Terms) -> Tensor:
    """The KL penalty of each token: beta times its KL estimate, (T,), float64, detached."""
    estimate = objective.kl_estimate(
        logprobs.detach().double(),
        reference.double(),
        estimator=terms.config.kl_estimator,
        clip=terms.config.kl_clip,
    )
    return terms.beta * estimate


def _sample_advantages(
    samples: Sequence[Sample], penalties: Mapping[Key, Tensor], config: RLOOConfig
) -> dict[Key, Tensor]:
    """The advantages of a whole rollout; without `penalties` there is no KL penalty."""
    lengths = [s.num_trained for s in samples]
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
