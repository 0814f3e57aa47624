"""One optimizer step: samples to micro-batches, loss, gradients, step.

Finishes the credit of samples whose advantages follow from the forward pass that is made anyway.
Knows nothing of sampling, rewards or files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor

from rloo import objective
from rloo.batch import MicroBatch, Sample, split
from rloo.config import RLOOConfig
from rloo.policy import Policy
from rloo.rollout import Credit, FirstPass, batch_advantages


def minibatches(samples: Sequence[Sample], config: RLOOConfig) -> Iterator[list[Sample]]:
    """The rollout cut into optimizer steps of `completions_per_step`, `num_iterations` times over.

    The cut is by place in the rollout, so a completion that could not be scored moves no other one.
    """
    size = config.completions_per_step()
    num_parts = config.prompts_per_rollout() * config.num_generations // size
    for _ in range(config.num_iterations):
        for part in range(num_parts):
            yield [
                s for s in samples if (s.key[0] * config.num_generations + s.key[1]) // size == part
            ]


def update(
    policy: Policy,
    samples: Sequence[Sample],
    given: Credit,
    config: RLOOConfig,
    *,
    record: FirstPass | None = None,
) -> dict[str, float]:
    """One optimizer step on `samples`: micro-batches forward and backward, then the step. `record`
    takes down what further steps on the same samples need.

    The loss is divided by what all countable samples make, those without signal included; a sample
    whose advantage is known to be exactly 0 is counted but not computed.
    """
    denominator = objective.loss_denominator(
        config.loss_aggregation,
        num_sequences=len(samples),
        num_tokens=sum(len(s.token_ids) for s in samples),
        constant=config.loss_constant,
    )
    known = given.advantages
    live = [s for s in samples if known is None or known[s.key] != 0.0]
    tally: dict[str, float] = defaultdict(float)
    cut = {"whole_groups": known is None, "packed": policy.packed}
    for part in split(live, policy.max_tokens, **cut):
        loss, parts = micro_loss(
            policy, policy.batch(part), given, config, denominator, record=record
        )
        policy.backward(loss)
        for name, value in parts.items():
            tally[name] = max(tally[name], value) if name.endswith("max") else tally[name] + value
    computed = {"update/computed_share": len(live) / len(samples) if samples else 0.0}
    if not live:
        policy.advance_schedule()
        return computed | {"update/no_signal": 1.0}
    return computed | _averages(tally) | policy.step()


def micro_loss(
    policy: Policy,
    batch: MicroBatch,
    given: Credit,
    config: RLOOConfig,
    denominator: float,
    *,
    record: FirstPass | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of one micro-batch (a scalar with gradient), and sums for the metrics."""
    logprobs, entropy = policy.logprobs(batch)
    now = logprobs.detach()
    sums: dict[str, float] = {}
    if given.advantages is not None:
        advantages = now.new_tensor([given.advantages[key] for key in batch.keys])
    else:
        reference = policy.reference_logprobs(batch)
        advantages, kl = batch_advantages(batch, now, reference, config)
        sums["kl"] = kl.sum().item()
    if record is not None:
        record.see(batch, now, advantages)
    result = objective.policy_loss(
        logprobs,
        given.old_logprobs_of(batch, now),
        advantages,
        batch.sequence_T,
        denominator=denominator,
        ratio_level=config.importance_sampling_level,
        aggregation=config.loss_aggregation,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
    )
    mismatch = (now - batch.engine_T).abs()
    sums |= {
        "loss": result.loss.item(),
        "entropy": entropy.sum().item(),
        "tokens": float(len(now)),
        "sequences": float(batch.size),
        "ratios": float(result.clipped_low.numel()),
        "clipped_low": result.clipped_low.sum().item(),
        "clipped_high": result.clipped_high.sum().item(),
        "mismatch": mismatch.sum().item(),
        "mismatch/max": mismatch.max().item(),
    }
    return result.loss, sums


def _averages(tally: dict[str, float]) -> dict[str, float]:
    tokens, sequences, ratios = tally["tokens"], tally["sequences"], tally["ratios"]
    low, high = tally["clipped_low"] / ratios, tally["clipped_high"] / ratios
    metrics = {
        "loss": tally["loss"],
        "entropy": tally["entropy"] / tokens,
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
        "mismatch/mean": tally["mismatch"] / tokens,
        "mismatch/max": tally["mismatch/max"],
    }
    if "kl" in tally:
        metrics |= {"kl": tally["kl"] / tokens, "kl/sequence": tally["kl"] / sequences}
    return metrics
