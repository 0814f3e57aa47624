"""The record of an optimizer step: counts, metrics, and requests of callbacks."""

from __future__ import annotations

import math
from functools import partial

import torch

from rloo.algorithm.estimator_registry import load_estimator
from rloo.algorithm.rank_rollout import all_gather_by_key
from rloo.algorithm.regression import Observation, ReturnRegression, half_life_of, pool_of
from rloo.algorithm.reward_shaping import shaped_rewards
from rloo.algorithm.rollout_histograms import rollout_histograms
from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.algorithm.token_records import detailed
from rloo.algorithm.update_metrics import to_cpu
from rloo.config.estimator_config import running_decay_of
from rloo.model.training_state import capture_rng

MAX_REFUSED_STEPS = 3


def begin_step(parts: TrainerComponents) -> None:
    """Call `on_step_begin` of the callbacks, and reset the communication metrics, so that these do
    not include the traffic of an evaluation or of the start of the run."""
    parts.events.send("on_step_begin")
    if (links := parts.world.collectives) is not None:
        links.received, links.seconds = 0, 0.0


def record(
    parts: TrainerComponents, state: TrainState, hand: ActiveRollout, stats: dict[str, float]
) -> None:
    """Count an optimizer step, log it, and collect requests of callbacks. The metrics of a rollout
    are logged with its first step, since all advantages are known by then."""
    first, config = not hand.steps_done, parts.config
    adaptive, rollout = state.kl_controller, hand.rollout
    if first:
        decay = running_decay_of(config)
        adaptive.update_reward_stats(shaped_rewards(rollout.groups, config), decay)
        target = config.kl_options.target
        adaptive.update_kl(stats.get("kl", target or 0.0), len(hand.samples), config)
        stats = rollout.metrics | stats | learn_baseline(parts, adaptive.regression, hand)
    if config.kl_options.target is not None:
        stats["kl/coef"] = adaptive.used_beta
    if config.sync_ref_model and (state.step + 1) % config.ref_model_sync_steps == 0:
        parts.policy.reference.move(config.ref_model_mixup_alpha)
    _count(parts, state, hand, refused=bool(stats.get("update/nonfinite")))
    times = parts.clock.take()
    lowered = [c["to"] for c in state.budget_changes if c["step"] == state.step]
    if lowered:
        stats["update/max_tokens"] = float(lowered[-1])
    stats |= (
        _of_links(parts)
        | times
        | {
            "step_time": sum(times.values()),
            "wall_time": parts.clock.run_seconds,
            "num_tokens": float(state.num_tokens),
            "epoch": rollout.epoch,
        }
    )
    stats = parts.world.broadcast_object(stats)  # all ranks log the same, times included
    parts.monitor.step(state.step, stats)
    if first:
        parts.monitor.completions(state.step, rollout.groups)
        tokenizer = parts.policy.tokenizer
        parts.monitor.groups(state.step, partial(detailed, hand, config, tokenizer))
        parts.monitor.histograms(state.step, partial(rollout_histograms, hand))
    state.generators = capture_rng()
    finish_step(parts, state, stats)
    if state.refused_in_a_row >= MAX_REFUSED_STEPS:
        raise FloatingPointError(
            f"the gradient was not finite in {MAX_REFUSED_STEPS} steps in a row, the last one step "
            f"{state.step}; no such step changed the weights (learning_rate, max_grad_norm)"
        )


def learn_baseline(
    parts: TrainerComponents, fitted: ReturnRegression, hand: ActiveRollout
) -> dict[str, float]:
    """Add a rollout to the regression, if the estimator reads its coefficients, and return the
    metrics. All ranks add all completions, in one order."""
    config, groups = parts.config, hand.rollout.groups
    if not hand.samples or not load_estimator(config).reads_coefficients:
        return {}
    observed = all_gather_by_key(to_cpu(hand.credit.observed), parts.world)
    rows = torch.stack(list(observed.values())).tolist()
    rows_by_key = dict(zip(observed, rows, strict=True))
    rollout: dict[int, list[Observation]] = {}
    for sample in hand.samples:
        weight, above, others = rows_by_key[sample.key]
        weight *= sample.weight**2
        if config.loss_aggregation == "sequence_token_mean":
            weight /= max(sample.num_trained, 1) ** 2
        masked = sample.truncated and config.mask_truncated_completions
        if not masked and all(map(math.isfinite, (weight, above, others))):
            seen = Observation(weight, above, others, sample.coefficients)
            rollout.setdefault(sample.key[0], []).append(seen)
    pools = ((pool_of(groups[number].prompt, config), some) for number, some in rollout.items())
    fitted.add(pools, half_life_of(config))
    ratio = fitted.variance_ratio
    return {} if ratio is None else {"baseline/variance_ratio": ratio}


def finish_step(
    parts: TrainerComponents, state: TrainState, stats: dict[str, float] | None = None
) -> None:
    """Log a step's metrics, call `on_step_end` of the callbacks, and record the callbacks'
    requests. If a callback ended the run here, the resumed run calls this function again with
    `stats` None."""
    state.step_open = True
    parts.monitor.log(stats)
    note_pending_work(state)
    state.step_open, state.generators = False, capture_rng()


def note_pending_work(state: TrainState) -> None:
    """Record in `state` that callbacks requested an evaluation or a checkpoint, before the next
    event is sent. Raises ValueError if a callback requested the end of an epoch."""
    control = state.control
    state.evaluation_pending |= control.should_evaluate and state.evaluated_at != state.step
    state.save_pending |= control.should_save
    if control.should_epoch_stop:
        raise ValueError(
            "a callback set should_epoch_stop; an epoch cannot end early, only training can "
            "(should_training_stop)"
        )


def _of_links(parts: TrainerComponents) -> dict[str, float]:
    """The bytes that all ranks sent in this step, and the seconds that this rank waited."""
    links = parts.world.collectives
    if links is None:
        return {}
    return {"rank/gathered_bytes": float(links.received), "rank/wait_time": links.seconds}


def _count(
    parts: TrainerComponents, state: TrainState, hand: ActiveRollout, *, refused: bool
) -> None:
    state.trainer.global_step += 1
    state.weights_ahead_of_record = False
    if not hand.steps_done:
        state.position = hand.rollout.position
        state.num_tokens += hand.rollout.num_tokens
    hand.steps_done += 1
    state.active_rollout = hand if hand.steps_done < parts.batches.steps_per_rollout else None
    state.trainer.epoch = hand.rollout.epoch
    state.refused_in_a_row = state.refused_in_a_row + 1 if refused else 0
