"""One optimizer step: micro-batches, loss, gradients, step of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rloo.algorithm.advantages import Advantages, add_advantages
from rloo.algorithm.loss import has_other_terms, loss, loss_denominator
from rloo.algorithm.loss_context import LossContext
from rloo.algorithm.loss_input import LossInputs
from rloo.algorithm.ragged import Completions
from rloo.algorithm.token_kl import trained_kl
from rloo.algorithm.token_values import score_first
from rloo.algorithm.update_metrics import (
    MetricSums,
    MetricTotals,
    add,
    add_micro_batch,
    averages,
    gather,
    imbalance,
    read,
)
from rloo.model.autocast_cache import casting_once
from rloo.model.logprobs import TokenScores
from rloo.model.micro_batch import MicroBatch, deal
from rloo.model.policy import Policy
from rloo.tracking.metrics import sampled_entropy
from rloo.types import Sample


def update(
    policy: Policy, samples: Sequence[Sample], credit: Advantages, terms: LossContext
) -> dict[str, float]:
    """Make one optimizer step on `samples`: forward and backward passes of the micro-batches, then
    the step. The policy does not change before the step. If an advantage multiplies every term of
    the loss, samples with an advantage of exactly 0 are skipped, but count in the loss denominator.
    If all samples are skipped, there is no step. Returns the metrics."""
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
    dealt = deal(
        live, policy.world.num_row_groups, whole_groups=credit.from_update, packed=policy.packed
    )

    def compute() -> MetricTotals:
        tally: MetricSums = {}
        for batch, is_ours, is_last in policy.micro_batches(dealt, whole_groups=credit.from_update):
            if is_ours:
                value, sums = micro_batch_loss(
                    policy, batch, credit, terms, denominator, input_tokens
                )
                gather(tally, sums)
            else:
                value = 0.0 * _forward(policy, batch, credit, terms).logprobs.sum()
            policy.stepper.backward(value, last=is_last, sums=True)
        return read(tally)

    tally: MetricTotals = {}
    with policy.in_step(), casting_once(policy):
        starts = (policy.stepper.start_sum,) if live else ()
        done = policy.world.run_on_all_ranks(compute, *starts)
    for sums in done:
        add(tally, sums)
    metrics = averages(tally, samples, config) | credit.stats
    if not computes_all:  # the entropy of the computed samples is a biased mean
        metrics.pop("entropy", None)
        metrics |= sampled_entropy(s.of_trained(s.policy_logprobs) for s in samples)
    metrics |= imbalance(dealt, packed=policy.packed)
    policy.stepper.after_backward(credit)
    metrics["update/no_signal"] = float(not live)
    if not live:
        return metrics | policy.stepper.skip()
    policy.stepper.finish_sum()
    # With fewer effective samples, the learning rate of the step is lower (VCPO, arXiv 2602.17616).
    scale = math.sqrt(metrics["sampling/effective_share"] if config.async_options.ess_guard else 1)
    with policy.in_step(forward=False):
        return metrics | policy.stepper.step(scale)


def micro_batch_loss(
    policy: Policy,
    batch: MicroBatch,
    credit: Advantages,
    terms: LossContext,
    denominator: float,
    input_tokens: int | None = None,
) -> tuple[Tensor, MetricSums]:
    """Return the loss of one micro-batch (a scalar with gradient), and sums for the metrics on the
    same device. `input_tokens` is the number of input tokens of all micro-batches, by default of
    this one."""
    scores = _forward(policy, batch, credit, terms)
    now = scores.logprobs.detach()
    if credit.from_update:
        advantages = add_advantages(credit, batch, scores, terms)
    else:
        advantages = credit.of_batch(batch, now)
    old = credit.old(batch, now)
    inputs = LossInputs(
        scores.logprobs, scores.entropy, advantages, old, batch.behavior_T, scores.reference,
        batch.truncated_N, batch.weight_N.to(now), Completions(batch.sequence_T, batch.size),
        trained_kl(scores, batch, terms),
    )  # fmt: skip
    value, parts = loss(inputs, terms.config, terms.beta, denominator)
    sums: MetricSums = {**parts}
    if scores.balance is not None:
        value = value + policy.aux_loss_weight * _share(scores.balance, batch, input_tokens, sums)
    sums["loss"] = value.detach()
    add_micro_batch(sums, batch, inputs, terms.watched(batch.truncated_N))
    return value, sums


def _forward(
    policy: Policy, batch: MicroBatch, credit: Advantages, terms: LossContext
) -> TokenScores:
    """The forward pass of the policy, and of the reference if the KL is needed."""
    if credit.from_update:
        return score_first(policy, batch, terms)
    return policy.logprobs(batch, reference=terms.kl_in_loss)


def _share(
    aux_loss: Tensor, batch: MicroBatch, input_tokens: int | None, sums: MetricSums
) -> Tensor:
    """The load-balancing loss of a micro-batch, weighted by its share of the input tokens. The sum
    of these parts approximates the loss over all tokens, which is a product of means."""
    here = batch.multiplicity.sum()
    part: Tensor = aux_loss * (here / (input_tokens or here))
    sums["aux_loss"] = part.detach()
    return part


def _computes_all(policy: Policy, samples: Sequence[Sample], terms: LossContext) -> bool:
    """Whether samples with an advantage of 0 are computed, too: if there is a KL penalty, an
    entropy bonus or a load-balancing loss, if the preset requires it, or if tokens were sampled
    from another distribution than the policy's (the entropy then needs the forward pass)."""
    filtered = any(s.behavior_logprobs not in (None, s.policy_logprobs) for s in samples)
    adds = (
        terms.beta != 0 or has_other_terms(terms.config, terms.beta) or policy.aux_loss_weight != 0
    )
    return adds or terms.config.loss_form.all_completions or filtered
