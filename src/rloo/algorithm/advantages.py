"""Advantages from scored completions: subtract the KL penalty, subtract the baseline, scale.

Advantages are computed before the update or during it. With a KL penalty or score norms, the update
computes them by default: its forward pass yields the values, which saves a separate pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.regression import observe
from rloo.algorithm.token_kl import measured_kl
from rloo.algorithm.token_values import (
    Key,
    returns_of_batch,
    returns_of_samples,
    score_before_update,
    token_values,
    without_signal,
)
from rloo.algorithm.update_metrics import (
    MetricSums,
    MetricTotals,
    add,
    gather,
    read,
    recorded_sum,
    to_cpu,
)
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch, deal, exceeds
from rloo.model.offload import send
from rloo.model.policy import Policy
from rloo.types import Sample


@dataclass(slots=True)
class Advantages:
    """The advantages of a rollout, and the log-probs of each completion's first forward pass.

    `by_completion` has one advantage per completion, or one per token with token-level ratios. If
    `from_update`, `by_completion` starts with those known to be 0: the first optimizer step covers
    the whole rollout in micro-batches of whole groups, and adds the others. `stats` are the metrics
    of a separate forward pass, if there was one. `is_shared` is true once every rank has the
    advantages and log-probs of all ranks. `observed` has what
    `rloo.algorithm.regression.observe` returns for each completion, if the estimator reads
    coefficients."""

    by_completion: dict[Key, Tensor] = field(default_factory=dict)
    old_logprobs: dict[Key, Tensor] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    is_shared: bool = False
    from_update: bool = False
    observed: dict[Key, Tensor] = field(default_factory=dict)

    def has_reward_variance(self, key: Key) -> bool:
        """Return False if the completion's advantages are known to be exactly 0."""
        unknown = self.from_update and key not in self.by_completion
        return unknown or bool(self.by_completion[key].any())

    def of_batch(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """Return a batch's advantages, (N,) or (T,), on the device and in the dtype of `now`, its
        log-probs."""
        values = torch.cat([self.by_completion[key] for key in batch.keys])
        return send(values, now.device).to(now.dtype)

    def add(self, batch: MicroBatch, values: Tensor) -> None:
        """Store the advantages of a batch, (N,) or (T,)."""
        self.by_completion.update(_by_key(batch.keys, batch.lengths, values))

    def old(self, batch: MicroBatch, now: Tensor) -> Tensor:
        """Return the log-probs (T,) of each completion's first forward pass. `now` (T,) are the
        log-probs of the current pass."""
        parts = zip(batch.keys, now.split(batch.lengths), strict=True)
        seen = self.old_logprobs
        return torch.cat([seen.setdefault(key, part).to(now.device) for key, part in parts])

    def after_first_step(self, metrics: Mapping[str, float]) -> Advantages:
        """Return the advantages for the remaining steps on the same rollout. `metrics` of the first
        step include the KL if `from_update`."""
        if not self.from_update:
            return self
        stats = {name: metrics[name] for name in ("kl", "kl/sequence") if name in metrics}
        return replace(self, stats=stats, is_shared=True, from_update=False)


def compute_advantages(samples: Sequence[Sample], policy: Policy, terms: LossContext) -> Advantages:
    """Compute the advantages and log-probs that must be known before the first step. Without a KL
    penalty in the reward, only the rewards determine the advantages of most estimators. Otherwise
    the update's forward pass computes what advantages need. A separate pass computes it if the
    first step covers a part of the rollout, if the estimator uses the whole rollout, or if a group
    exceeds the token budget."""
    if not samples:
        return Advantages()
    in_parts = terms.batches.parts_per_rollout > 1
    if not terms.values_from_forward and not in_parts:
        return _of_samples(samples, {}, terms)
    needs_pass = (
        in_parts
        or terms.estimator.over_rollout
        or exceeds(samples, policy.max_tokens, packed=policy.packed)
    )
    if needs_pass:
        return _from_own_pass(samples, policy, terms)
    return Advantages(without_signal(samples, terms), from_update=True)


def _from_own_pass(samples: Sequence[Sample], policy: Policy, terms: LossContext) -> Advantages:
    dealt = deal(samples, policy.world.num_row_groups, whole_groups=False, packed=policy.packed)
    old: dict[Key, Tensor] = {}

    def compute() -> tuple[dict[Key, Tensor], dict[Key, Tensor], MetricTotals]:
        values: dict[Key, Tensor] = {}
        sums: MetricSums = {}
        for batch, is_ours, _ in policy.micro_batches(dealt, whole_groups=False):
            scores = score_before_update(policy, batch, terms)
            if not is_ours:
                continue
            old.update(zip(batch.keys, scores.logprobs.split(batch.lengths), strict=True))
            if terms.values_from_forward:
                found = token_values(scores, batch.sequence_T, terms).stacked()
                values.update(zip(batch.keys, found.split(batch.lengths), strict=True))
            if (measured := measured_kl(scores)) is not None:
                watched_N = terms.watched(batch.truncated_N)
                watched_T = watched_N[batch.sequence_T]
                kl = recorded_sum(measured, watched_T)
                gather(sums, {"kl": kl, "tokens": watched_T.sum(), "sequences": watched_N.sum()})
        return old, to_cpu(values), read(sums)

    with policy.in_step():
        parts = policy.world.run_on_all_ranks(compute)
    sums, stats = MetricTotals(), {}
    values: dict[Key, Tensor] = {}
    for seen, found, some in parts:
        old.update({key: values.to(policy.world.device) for key, values in seen.items()})
        values.update(found)
        add(sums, some)
    if terms.kl_in_reward:
        tokens, sequences = (max(sums.get(of, 0.0), 1.0) for of in ("tokens", "sequences"))
        stats = {"kl": sums.get("kl", 0.0) / tokens, "kl/sequence": sums.get("kl", 0.0) / sequences}
    credit = _of_samples(samples, values, terms)
    credit.old_logprobs, credit.stats = old, stats
    return credit


def add_advantages(
    credit: Advantages, batch: MicroBatch, scores: TokenScores, terms: LossContext
) -> Tensor:
    """Add the advantages of a micro-batch of whole groups to `credit`, and return them: (N,), or
    (T,) with token-level ratios. `scores` must have what `token_values` needs."""
    returns = returns_of_batch(batch, scores, terms)
    found = terms.advantages(returns, all_scored=batch.all_scored).to(scores.logprobs.dtype)
    credit.add(batch, found)
    if terms.estimator.reads_coefficients:
        credit.observed.update(observe(batch.keys, returns))
    return found


def _of_samples(
    samples: Sequence[Sample], values: Mapping[Key, Tensor], terms: LossContext
) -> Advantages:
    """Return the advantages of a whole rollout. Without `values` the KL penalty is 0."""
    keys, lengths = [s.key for s in samples], [s.num_trained for s in samples]
    returns = returns_of_samples(samples, values)
    credit = Advantages(_by_key(keys, lengths, terms.advantages(returns)))
    if terms.estimator.reads_coefficients:
        credit.observed.update(observe(keys, returns))
    return credit


def _by_key(keys: Sequence[Key], lengths: Sequence[int], values: Tensor) -> dict[Key, Tensor]:
    sizes = [1] * len(keys) if len(values) == len(keys) else list(lengths)
    return dict(zip(keys, values.split(sizes), strict=True))
