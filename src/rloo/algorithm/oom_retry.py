"""Out-of-memory handling: the token budget of a micro-batch is lowered before sampling starts, and
at most once during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import groupby, islice
from typing import Any, TypeVar

import torch

from rloo.algorithm.state import ActiveRollout, TrainerComponents, TrainState
from rloo.distributed.process_group import AllOutOfMemory
from rloo.model.memory_estimate import count_tokens
from rloo.model.micro_batch import make_sample, pack
from rloo.model.policy import Policy
from rloo.model.prepare_model import without_packing
from rloo.model.token_budget import fitting_budget
from rloo.types import Sample

T = TypeVar("T")


def fit_token_budget(parts: TrainerComponents, state: TrainState) -> None:
    """Lower the token budget if the largest micro-batch does not fit into memory. A resumed run
    keeps its earlier budget. Raises ValueError if no budget fits."""
    changes, policy = state.budget_changes, parts.policy
    if changes and changes[-1]["to"] == policy.max_tokens:
        return
    # The engine's copy of the weights takes memory as well.
    policy.load_into(parts.engine)
    _settle_packing(parts, partial(_try_packing, policy))
    with policy.in_step():
        fit = fitting_budget(policy, parts.workload)
    if fit.reason is not None:
        _lower_budget(parts, state, fit.max_tokens, fit.reason, cause="rehearsal")


def _try_packing(policy: Policy) -> None:
    """Run the model on packed rows of a few tokens. If this fails, updates use padding, and a note
    gives the reason. On a GPU, this also tests the kernels for packed rows before the first
    step."""
    if not policy.packed:
        return
    try:
        samples = [make_sample((n // 2, n), 2, 2 + n) for n in range(4)]
        policy.score(pack(samples, policy.device))
    except (torch.OutOfMemoryError, torch.distributed.DistError):
        raise
    except (TypeError, RuntimeError) as error:  # the model's forward does not take packed rows
        policy.notes.append(without_packing(policy.config, f"packed it fails with {error}"))
        policy.packed = False


def verify_packed_forward(
    parts: TrainerComponents, state: TrainState, samples: Sequence[Sample]
) -> None:
    """Compare the forward passes of training with the model's forward, on a run's first samples."""
    policy = parts.policy
    if not samples or policy.checked:
        return
    packed = policy.packed
    groups = groupby(samples, key=lambda sample: sample.key[0])
    few = [s for _, members in groups for s in islice(members, 2)][:4]
    _settle_packing(parts, partial(policy.check_forward, few))
    if policy.packed != packed:  # with padding, other budgets fit
        fit_token_budget(parts, state)
    report_notes(parts)


def _settle_packing(parts: TrainerComponents, trial: Callable[[], object]) -> None:
    """Run `trial` on all ranks; if any rank falls back to padding, all do."""
    with parts.policy.in_step():
        trial()
    parts.policy.packed = not parts.world.any_rank(not parts.policy.packed)


def with_oom_retry(
    stage: Callable[..., T], before_retry: Callable[..., object] = lambda *_: None
) -> Callable[..., T]:
    """Wrap `stage`. Its arguments are components, state and some inputs, with the samples as the
    last argument. If `stage` runs out of memory, it is retried with half the token budget, once in
    a run. `before_retry` is called before the retry with the same arguments. Raises
    torch.OutOfMemoryError if memory runs out a second time, and if the weights may have changed."""

    @wraps(stage)
    def retrying(parts: TrainerComponents, state: TrainState, *inputs: Any) -> T:
        try:
            return stage(parts, state, *inputs)
        except torch.OutOfMemoryError as error:
            _require_first(parts, state, error)
        # Outside of the except block, the error no longer keeps the frames and their tensors alive.
        _halve_budget(parts, state, inputs[-1])
        before_retry(parts, state, *inputs)
        return stage(parts, state, *inputs)

    return retrying


def recompute_advantages(
    parts: TrainerComponents, state: TrainState, active: ActiveRollout, *_: object
) -> None:
    """Recompute the advantages of a rollout, unless an optimizer step was made on the rollout."""
    if active.steps_done == 0:
        active.credit = parts.compute_advantages(parts, state, active.samples)


def report_notes(parts: TrainerComponents) -> None:
    """Pass the policy's new notes to the monitor."""
    for note in parts.policy.notes:
        if note not in parts.monitor.notes:
            parts.monitor.note(note)


def _require_first(
    parts: TrainerComponents, state: TrainState, error: torch.OutOfMemoryError
) -> None:
    alone = parts.world.collectives is not None and not isinstance(error, AllOutOfMemory)
    again = any(change["cause"] == "update" for change in state.budget_changes)
    if alone or again or state.weights_ahead_of_record:
        error.add_note(
            "the token budget was lowered before and is not lowered again; lower "
            "max_tokens_per_micro_batch or max_completion_length, or turn on "
            "gradient_checkpointing"
        )
        raise error


def _halve_budget(parts: TrainerComponents, state: TrainState, samples: Sequence[Sample]) -> None:
    policy = parts.policy
    policy.stepper.finish_sum()  # all processes have started it
    policy.stepper.clear()
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    size = max(1, min(policy.max_tokens, count_tokens(policy, samples)) // 2)
    _lower_budget(parts, state, size, "memory did not suffice for an update", cause="update")
    report_notes(parts)


def _lower_budget(
    parts: TrainerComponents, state: TrainState, size: int, reason: str, *, cause: str
) -> None:
    """Lower the token budget from the next step on, and record the change."""
    step, before = state.step + 1, parts.policy.max_tokens
    parts.policy.max_tokens = size
    state.budget_changes.append({"step": step, "from": before, "to": size, "cause": cause})
    parts.policy.notes.append(
        f"from step {step} on a micro-batch has at most {size:,} tokens, not "
        f"{before:,}: {reason} (max_tokens_per_micro_batch)"
    )
