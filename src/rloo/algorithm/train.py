"""The RLOO algorithm on one page: sync weights, generate, score, advantages, update, record.

Read in this order: train, rollout, baselines, estimators, advantages, loss, update.
`trainer/training_loop.py` calls `train_on_rollout` until the run ends. Between the calls, the
training loop evaluates and saves."""

from __future__ import annotations

from collections.abc import Callable

from rloo.algorithm.oom_retry import verify_packed_forward
from rloo.algorithm.reward_shaping import make_training_samples
from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.algorithm.step_record import begin_step, record


def train_on_rollout(
    parts: TrainerComponents, state: TrainState, save: Callable[[], object] = lambda: None
) -> None:
    """Sample and score a rollout and make all of its optimizer steps. On resume, make the remaining
    steps of the active rollout. `save` is called between two steps if a signal requested a
    checkpoint."""
    active = state.active_rollout or start_rollout(parts, state)
    for number, minibatch in enumerate(active.remaining_minibatches(parts.batches)):
        if number:
            begin_step(parts)
        # A signal that arrives after the optimizer's step is handled once the step is recorded.
        with parts.stop.released():
            metrics = parts.update(parts, state, active, minibatch)
            record(parts, state, active, metrics)
        if state.is_over:
            break
        if state.active_rollout is not None and parts.world.any_rank(parts.stop.save_wanted):
            save()
    state.active_rollout = None


def start_rollout(parts: TrainerComponents, state: TrainState) -> ActiveRollout:
    """Sync the engine's weights, generate and score a rollout, and compute its advantages."""
    if parts.rollouts.needs_weights:
        parts.policy.load_into(parts.engine)
    rollout = parts.rollouts.next()
    samples = make_training_samples(rollout, parts.config, state.kl_controller)
    verify_packed_forward(parts, state, samples)
    return ActiveRollout(rollout, samples, parts.compute_advantages(parts, state, samples))
