"""One optimizer step: samples to micro-batches, loss, gradients, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rloo.algorithm.advantages import Advantages, LossContext
from rloo.algorithm.completion_exchange import fetch_old_logprobs, owner_ranks_of, with_own_tokens
from rloo.algorithm.loss import (
    Completions,
    PolicyLossConfig,
    aggregate,
    importance_weights,
    kl_estimate,
    loss_denominator,
    policy_loss,
    ratio_of,
    sum_by,
)
from rloo.algorithm.update_metrics import (
    MetricSums,
    MetricTotals,
    add,
    averages,
    gather,
    imbalance,
    read,
    recorded_sum,
)
from rloo.config.batch_sizes import BatchSizes
from rloo.config.config import RLOOConfig
from rloo.model.autocast_cache import casting_once
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch, deal
from rloo.model.policy import Policy
from rloo.tracking.metrics import sampled_entropy
from rloo.types import Sample


def minibatches(samples: Sequence[Sample], batches: BatchSizes) -> Iterator[list[Sample]]:
    """Divide the rollout into optimizer steps of `completions_per_step`, `num_iterations` times:
    by place in the rollout, so that a completion that could not be scored moves no other."""
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.place // batches.completions_per_step, []).append(sample)
    for _ in range(batches.num_iterations):
        for part in range(batches.parts_per_rollout):
            yield list(parts.get(part, ()))


def update(
    policy: Policy,
    samples: Sequence[Sample],
    credit: Advantages,
    terms: LossContext,
    before_step: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """One optimizer step on `samples`: micro-batches forward and backward, then the step, before
    which nothing of the policy has changed. Where nothing but its advantage counts, a sample of
    which that is known to be exactly 0 is not computed, but counts in the divisor of the loss;
    where no sample is computed, there is no step."""
    config = terms.config
    denominator = loss_denominator(
        config.loss_aggregation,
        num_sequences=len(samples),
        num_tokens=sum(s.num_trained for s in samples),
        constant=config.loss_constant,
    )
    computes_all = _computes_all(policy, samples, terms)
    live = [s for s in samples if computes_all or credit.has_reward_variance(s.key)]
    input_tokens = sum(len(s.prompt_ids) + len(s.token_ids) - 1 for s in live)
    dealt = deal(live, policy.world.size, whole_groups=credit.from_update, packed=policy.packed)
    dealt = with_own_tokens(dealt, policy.world)
    fetch_old_logprobs(credit.old_logprobs, credit.owner_ranks, dealt, policy.world)
    credit.owner_ranks.update(owner_ranks_of(dealt) | credit.owner_ranks)

    def compute() -> MetricTotals:
        tally: MetricSums = {}
        for batch, is_ours, is_last in policy.micro_batches(dealt, whole_groups=credit.from_update):
            if is_ours:
                loss, sums = micro_batch_loss(
                    policy, batch, credit, terms, denominator, input_tokens
                )
                gather(tally, sums)
            else:
                loss = 0.0 * policy.logprobs(batch).logprobs.sum()
                if _compares(credit, terms):
                    policy.reference_logprobs(batch)
            policy.stepper.backward(loss, last=is_last)
        return read(tally)

    tally: MetricTotals = {}
    with policy.in_step(), casting_once(policy):
        done = policy.world.run_on_all_ranks(compute)
    for sums in done:
        add(tally, sums)
    metrics = credit.stats | averages(tally, samples, config)
    if not computes_all:  # the entropy of those computed is that of completions with signal
        metrics.pop("entropy", None)
        metrics |= sampled_entropy(s.of_trained(s.policy_logprobs) for s in samples)
    metrics |= imbalance(dealt, packed=policy.packed)
    before_step()
    metrics["update/no_signal"] = float(not live)
    if not live:
        return metrics | policy.stepper.skip()
    policy.stepper.sum_gradients()
    # A step on few effective samples is a small one (VCPO, arXiv 2602.17616).
    scale = (
        math.sqrt(metrics["sampling/effective_share"]) if config.async_options.ess_guard else 1.0
    )
    with policy.in_step():
        return metrics | policy.stepper.step(scale)


def micro_batch_loss(
    policy: Policy,
    batch: MicroBatch,
    credit: Advantages,
    terms: LossContext,
    denominator: float,
    input_tokens: int | None = None,
) -> tuple[Tensor, MetricSums]:
    """The loss of one micro-batch (a scalar with gradient), and sums for the metrics, which
    are left on its device. `input_tokens` is the total over all micro-batches, by default of
    this one."""
    config = terms.config
    scores = policy.logprobs(batch)
    now = scores.logprobs.detach()
    watched_N = terms.watched(batch.truncated_N)
    watched_T = watched_N[batch.sequence_T]
    sums: MetricSums = {}
    reference = None
    if _compares(credit, terms):
        reference = policy.reference_logprobs(batch)
        sums["kl"] = recorded_sum(now - reference, watched_T)
    advantages = credit.advantages(batch, now, reference)
    old = credit.old(batch, now)
    completions = Completions(batch.sequence_T, batch.size)
    weights = _correction(batch, old, completions, config, sums)
    result = policy_loss(scores.logprobs, old, advantages, completions, _surrogate(config), weights)
    others: Tensor | float = 0.0
    if _has_other_terms(terms):
        others_T = _other_terms(scores, old, reference, batch, terms)
        others = aggregate(others_T, completions, config.loss_aggregation)
    loss = result.loss / denominator + others / denominator
    if scores.balance is not None:
        loss = loss + policy.aux_loss_weight * _share(scores.balance, batch, input_tokens, sums)
    mismatch = (now - batch.policy_T).abs()
    sums |= {
        "loss": loss.detach(),
        "entropy": recorded_sum(scores.entropy.detach(), watched_T),
        "tokens": float(len(now)),
        "sequences": float(batch.size),
        "watched_tokens": watched_T.sum(),
        "watched_sequences": watched_N.sum(),
        "clipped_low": result.clipped_low.sum(),
        "clipped_high": result.clipped_high.sum(),
        "mismatch": mismatch.sum(),
        "mismatch/max": mismatch.max(),
    }
    return loss, sums


def _compares(credit: Advantages, terms: LossContext) -> bool:
    """Whether a micro-batch needs the reference's log-probs."""
    return terms.kl_in_loss or credit.from_update


def _surrogate(config: RLOOConfig) -> PolicyLossConfig:
    return PolicyLossConfig(
        ratio_level=config.importance_sampling_level,
        aggregation=config.loss_aggregation,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        delta=config.delta,
    )


def _share(
    aux_loss: Tensor, batch: MicroBatch, input_tokens: int | None, sums: MetricSums
) -> Tensor:
    """A micro-batch's share of the mean balancing loss over all tokens: approximately, since the
    loss is a product of means."""
    here = batch.multiplicity.sum()
    part: Tensor = aux_loss * (here / (input_tokens or here))
    sums["aux_loss"] = part.detach()
    return part


def _has_other_terms(terms: LossContext) -> bool:
    """Whether the loss has terms that do not vanish when the advantage is 0."""
    return terms.kl_in_loss or terms.config.entropy_coef != 0


def _computes_all(policy: Policy, samples: Sequence[Sample], terms: LossContext) -> bool:
    """Whether samples without signal are computed, too: where their KL, entropy or experts count,
    where the preset does it, and where tokens were drawn from another distribution than the
    policy's, so that nothing is known of its entropy."""
    filtered = any(s.behavior_logprobs not in (None, s.policy_logprobs) for s in samples)
    adds = terms.beta != 0 or _has_other_terms(terms) or policy.aux_loss_weight != 0
    return adds or terms.config.loss_form.all_completions or filtered


def _other_terms(
    scores: TokenScores,
    old: Tensor,
    reference: Tensor | None,
    batch: MicroBatch,
    terms: LossContext,
) -> Tensor:
    """The KL in the loss and the entropy bonus, (T,); masked as truncated, a token has neither."""
    config, total_T = terms.config, torch.zeros_like(scores.logprobs)
    if config.entropy_coef != 0:  # its backward costs passes over the vocabulary
        total_T = total_T - config.entropy_coef * scores.entropy
    if terms.kl_in_loss:
        assert reference is not None
        kl = kl_estimate(
            scores.logprobs, reference, estimator=config.kl_estimator, clip=config.kl_options.clip
        )
        if config.use_bias_correction_kl:
            kl = kl * ratio_of(scores.logprobs - old)
        total_T = total_T + terms.beta * kl
    if config.mask_truncated_completions:
        total_T = torch.where(batch.truncated_N[batch.sequence_T], 0.0, total_T)
    return total_T


def _correction(
    batch: MicroBatch,
    old: Tensor,
    completions: Completions,
    config: RLOOConfig,
    sums: MetricSums,
) -> Tensor | None:
    """The weights of the off-policy correction, if any; their sums are added to `sums`."""
    mode = config.rollout_importance_sampling_mode
    if mode is None or mode == "off":
        return None
    weights = importance_weights(
        old - batch.behavior_T,
        completions,
        mode=mode,
        upper=config.rollout_importance_sampling_threshold,
        lower=config.rollout_importance_sampling_min,
    )
    sums["weight"] = weights.sum()
    one_T = torch.ones_like(weights)
    each_N = sum_by(weights, *completions) / sum_by(one_T, *completions)
    sums["completion_weight"] = each_N.sum()
    sums["completion_weight_squares"] = (each_N**2).sum()
    sums["sampling/importance_sampling_ratio/max"] = weights.max()
    return weights
