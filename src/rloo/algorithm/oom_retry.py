"""What must fit in memory, and what is done where it does not: the budget of a micro-batch is
lowered before the first sample, or once while training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, islice
from typing import TypeVar

import torch

from rloo.algorithm.advantages import Advantages, compute_advantages
from rloo.algorithm.completion_exchange import all_gather_by_key, fetch_old_logprobs, fetch_tokens
from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.algorithm.update import update
from rloo.distributed.process_group import AllOutOfMemory
from rloo.model.memory_estimate import count_tokens
from rloo.model.micro_batch import make_sample, pack
from rloo.model.policy import Policy
from rloo.model.prepare_model import without_packing
from rloo.model.token_budget import fitting_budget
from rloo.types import Sample

T = TypeVar("T")


def fit_token_budget(parts: TrainerComponents, state: TrainState) -> None:
    """Before the first sample, lower the token budget if the largest micro-batch does not fit into
    memory. A resumed run keeps its earlier budget. Raises ValueError if none suffices."""
    changes, policy = state.budget_changes, parts.policy
    if changes and changes[-1]["to"] == policy.max_tokens:
        return
    # Its copy of the weights takes memory as well.
    policy.load_into(parts.engine)
    _settle_packing(parts, partial(_try_packing, policy))
    with policy.in_step():
        fit = fitting_budget(policy, parts.workload)
    if fit.reason is not None:
        _lower_budget(parts, state, fit.max_tokens, fit.reason, cause="rehearsal")


def _try_packing(policy: Policy) -> None:
    """Compute a packed row of a few tokens. If the model cannot, updates fall back to padding,
    with a note; what a GPU has for packed rows is tried in passing, not in the midst of a step."""
    if not policy.packed:
        return
    try:
        samples = [make_sample((n // 2, n), 2, 2 + n) for n in range(4)]
        policy.score(pack(samples, policy.device))
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except (TypeError, RuntimeError) as error:  # what a model's forward does not expect
        policy.notes.append(without_packing(policy.config, f"packed it fails with {error}"))
        policy.packed = False


def verify_packed_forward(
    parts: TrainerComponents, state: TrainState, samples: Sequence[Sample]
) -> None:
    """Compare training's forward passes with the model's own, on a run's first few samples."""
    policy = parts.policy
    if not samples or policy.checked:
        return
    packed = policy.packed
    groups = groupby(samples, key=lambda sample: sample.key[0])
    few = [s for _, members in groups for s in islice(members, 2)][:4]
    few = fetch_tokens([few] * parts.world.size, parts.world)
    _settle_packing(parts, partial(policy.check_forward, few))
    if policy.packed != packed:  # other sizes fit now
        fit_token_budget(parts, state)
    report_notes(parts)


def _settle_packing(parts: TrainerComponents, trial: Callable[[], object]) -> None:
    """Have all processes pad where the trial of one says so."""
    with parts.policy.in_step():
        trial()
    parts.policy.packed = not parts.world.any_rank(not parts.policy.packed)


def advantages_with_oom_retry(
    parts: TrainerComponents, state: TrainState, samples: Sequence[Sample]
) -> Advantages:
    """The credit of a rollout, with smaller micro-batches where memory did not suffice."""

    def work() -> Advantages:
        with parts.clock.phase("credit"):
            return compute_advantages(samples, parts.policy, state.loss_context(parts))

    return _retry_on_oom(parts, state, samples, work) or work()


def update_with_oom_retry(
    parts: TrainerComponents, state: TrainState, hand: ActiveRollout, minibatch: Sequence[Sample]
) -> dict[str, float]:
    """One optimizer step on a part of the rollout's samples, again with smaller micro-batches
    where memory did not suffice; then the credit is assigned for these, too, unless the weights
    have moved since it was. Keeps the credit for the steps that follow; returns the metrics."""
    first_of_several = hand.steps_done == 0 and parts.batches.steps_per_rollout > 1

    def before_step() -> None:
        if first_of_several:  # the others need all that any process has seen in passing
            credit, world = hand.credit, parts.world
            if credit.owner_ranks:  # the main process saves them, perhaps when nobody answers
                to_main = [hand.samples if rank == 0 else [] for rank in range(world.size)]
                brought = fetch_tokens(to_main, world)
                hand.samples = brought if world.is_main else hand.samples
                fetch_old_logprobs(credit.old_logprobs, credit.owner_ranks, to_main, world)
            else:
                credit.old_logprobs = all_gather_by_key(credit.old_logprobs, world)
            credit.by_completion = (
                all_gather_by_key(credit.by_completion, world)
                if credit.from_update
                else credit.by_completion
            )
        parts.stop.hold()

    if parts.policy.divides:
        with parts.policy.in_step():
            parts.stop.hold()  # all processes make this step, or none does

    def work() -> dict[str, float]:
        with parts.clock.phase("update"):
            return update(
                parts.policy, minibatch, hand.credit, state.loss_context(parts), before_step
            )

    optimizer = parts.policy.stepper.optimizer
    watch = optimizer.register_step_pre_hook(
        lambda *_: setattr(state, "weights_ahead_of_record", True)
    )
    try:
        metrics = _retry_on_oom(parts, state, minibatch, work)
        if metrics is None:
            if hand.steps_done == 0:
                hand.credit = advantages_with_oom_retry(parts, state, hand.samples)
            metrics = work()
    finally:
        watch.remove()
    if first_of_several:
        hand.credit = hand.credit.after_first_step(metrics)
    return metrics


def report_notes(parts: TrainerComponents) -> None:
    """Have the monitor tell what the policy has noted since it last did."""
    for note in parts.policy.notes:
        if note not in parts.monitor.notes:
            parts.monitor.note(note)


def _retry_on_oom(
    parts: TrainerComponents, state: TrainState, samples: Sequence[Sample], work: Callable[[], T]
) -> T | None:
    """Run `work` on `samples`. Where memory does not suffice, halve the token budget, clear the
    gradients and return None, so that the caller tries again: once in a run. Raises
    torch.OutOfMemoryError the second time, and if the weights may have changed."""
    policy = parts.policy
    try:
        return work()
    except torch.OutOfMemoryError as error:
        alone = parts.world.collectives is not None and not isinstance(error, AllOutOfMemory)
        again = any(change["cause"] == "update" for change in state.budget_changes)
        if alone or again or state.weights_ahead_of_record:
            error.add_note(
                "the token budget was lowered before and is not lowered again; lower "
                "max_tokens_per_micro_batch or max_completion_length, or turn on "
                "gradient_checkpointing"
            )
            raise
    # Here the error no longer refers to the frames, and so to the memory that they allocated.
    policy.stepper.clear()
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    size = max(1, min(policy.max_tokens, count_tokens(policy, samples)) // 2)
    _lower_budget(parts, state, size, "memory did not suffice for an update", cause="update")
    report_notes(parts)
    return None


def _lower_budget(
    parts: TrainerComponents, state: TrainState, size: int, reason: str, *, cause: str
) -> None:
    """Make micro-batches smaller from the next step on, and record it."""
    step, before = state.step + 1, parts.policy.max_tokens
    parts.policy.max_tokens = size
    state.budget_changes.append({"step": step, "from": before, "to": size, "cause": cause})
    parts.policy.notes.append(
        f"from step {step} on a micro-batch has at most {size:,} tokens, not "
        f"{before:,}: {reason} (max_tokens_per_micro_batch)"
    )
