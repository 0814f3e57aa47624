"""Predicts the numbers of evaluations and checkpoints of a run, and the time of a checkpoint."""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
import time
from pathlib import Path

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import DefaultFlowCallback

from rloo.config.batch_sizes import BatchSizes
from rloo.config.compat.training_arguments import to_training_arguments
from rloo.config.config import RLOOConfig

# Bytes that are written to measure the speed of a disk.
_TRIED_BYTES = 2**25


def count_evaluations_and_saves(
    config: RLOOConfig, state: TrainerState, batches: BatchSizes, num_rows: int
) -> tuple[int, int]:
    """The numbers of evaluations and checkpoints from the first step of a run to its end. As in a
    run, Trainer's default callback requests them, and they take place at the end of a rollout. With
    `save_strategy` best, every evaluation counts as the best one. Callbacks that end a run early
    are not considered."""
    state, control = copy.copy(state), TrainerControl()
    flow, arguments = DefaultFlowCallback(), to_training_arguments(config)
    evaluations = checkpoints = drawn = 0
    evaluated = -1

    def asked(event: str) -> tuple[bool, bool]:
        control.should_evaluate = control.should_save = False
        getattr(flow, event)(arguments, state, control)
        return control.should_evaluate, control.should_save

    while state.global_step < state.max_steps:
        epoch = drawn // num_rows
        drawn += batches.prompts_per_rollout
        state.epoch = drawn / num_rows
        evaluates = saves = False
        for _ in range(min(batches.steps_per_rollout, state.max_steps - state.global_step)):
            state.global_step += 1
            of_step = asked("on_step_end")
            evaluates, saves = evaluates or of_step[0], saves or of_step[1]
        if state.global_step == state.max_steps or drawn // num_rows != epoch:
            of_epoch = asked("on_epoch_end")
            evaluates, saves = evaluates or of_epoch[0], saves or of_epoch[1]
        if evaluates:
            evaluations, evaluated = evaluations + 1, state.global_step
        checkpoints += saves or (evaluates and config.save_strategy == "best")
    if config.eval_on_start or config.eval_strategy != "no":
        evaluations += config.eval_on_start + (evaluated != state.global_step)
    return evaluations, checkpoints


def unused_intervals(config: RLOOConfig) -> list[str]:
    """A note for each interval that is set although its strategy ignores it."""
    notes = []
    for name in ("eval", "save"):
        steps, strategy = getattr(config, f"{name}_steps"), getattr(config, f"{name}_strategy")
        if strategy != "steps" and steps not in (None, getattr(RLOOConfig, f"{name}_steps")):
            notes.append(
                f"{name}_steps is {steps:g} and counts only where {name}_strategy is steps; it is "
                f"{strategy}"
            )
    return notes


def writing_seconds(folder: Path, size: int) -> float:
    """Predict the seconds to write and hash `size` bytes in `folder`, which need not exist. The
    prediction is extrapolated from the time to write fewer bytes to an anonymous temporary file."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    tried = os.urandom(min(size, _TRIED_BYTES))
    with tempfile.TemporaryFile(dir=there) as file:
        start = time.perf_counter()
        file.write(tried)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        hashlib.sha256(file.read())
        return (time.perf_counter() - start) * size / max(1, len(tried))
