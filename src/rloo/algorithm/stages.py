"""The two stages of a run that compute with the policy: advantages, and an optimizer step. Each
stage is timed. The code that builds the trainer's components wraps each stage in
`with_oom_retry`."""

from __future__ import annotations

from collections.abc import Sequence

from rloo.algorithm.advantages import Advantages, compute_advantages
from rloo.algorithm.rank_rollout import all_gather_by_key
from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.algorithm.stop_signals import StopSignals
from rloo.algorithm.update import update
from rloo.config.batch_sizes import BatchSizes
from rloo.distributed import World
from rloo.types import Sample


def advantages_stage(
    parts: TrainerComponents, state: TrainState, samples: Sequence[Sample]
) -> Advantages:
    """Return the advantages of a rollout."""
    with parts.clock.phase("credit"):
        return compute_advantages(samples, parts.policy, state.loss_context(parts))


def update_stage(
    parts: TrainerComponents, state: TrainState, active: ActiveRollout, minibatch: Sequence[Sample]
) -> dict[str, float]:
    """Make one optimizer step on a part of the rollout's samples, and return the metrics. The first
    of several steps also determines the advantages of the later steps."""
    policy = parts.policy
    if policy.in_lockstep:
        with policy.in_step():
            parts.stop.hold()  # all ranks make this step, or none does
    watch = policy.stepper.optimizer.register_step_pre_hook(
        lambda *_: setattr(state, "weights_ahead_of_record", True)
    )
    try:
        with parts.clock.phase("update"):
            metrics = update(policy, minibatch, active.credit, state.loss_context(parts))
    finally:
        watch.remove()
    if active.steps_done == 0 and parts.batches.steps_per_rollout > 1:
        active.credit = active.credit.after_first_step(metrics)
    return metrics


def after_backward(
    world: World, batches: BatchSizes, stop: StopSignals, credit: Advantages
) -> None:
    """Continue a step after its last backward pass. In the first of several steps on a rollout,
    gather the log-probs and advantages of all ranks, which the later steps need. From here on,
    signals are deferred."""
    if batches.steps_per_rollout > 1 and not credit.is_shared:
        credit.old_logprobs = all_gather_by_key(credit.old_logprobs, world)
        if credit.from_update:
            credit.by_completion = all_gather_by_key(credit.by_completion, world)
        credit.is_shared = True
    stop.hold()
