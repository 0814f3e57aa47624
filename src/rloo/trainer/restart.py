"""Repeated `train` calls of one trainer, as when a notebook cell is run twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from transformers import TrainerControl, TrainerState

from rloo.config.config import RLOOConfig

# Attributes of TrainerState that training does not change.
_PLACE = ("is_world_process_zero", "is_local_process_zero", "is_hyper_param_search")


class InitialLearningRates:
    """The initial state of a learning-rate schedule, with which the schedule can be restarted."""

    def __init__(self, scheduler: Any, remake: Callable[[int], Any] | None = None) -> None:
        """`remake(steps)` creates a schedule for `steps` steps. If `remake` is None, the user's
        schedule is reused."""
        self._scheduler, self._remake = scheduler, remake
        self._state = copy.deepcopy(scheduler.state_dict())

    def restart(self) -> None:
        """Set the schedule back to the first step."""
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        rates = self._scheduler.get_last_lr()
        for group, rate in zip(self._scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def of_length(self, steps: int) -> Any:
        """The schedule for `steps` steps, at its start."""
        self.restart()
        if self._remake is not None:
            self._scheduler = self._remake(steps)
            self._state = copy.deepcopy(self._scheduler.state_dict())
        return self._scheduler


def lengthen(trainer: Any, args: RLOOConfig, state: TrainerState) -> None:
    """Set the options of a trainer to `args`, which have another run length, and create a schedule
    for `state.max_steps`. A script needs this if it sets `args.max_steps = 4` and calls
    `trainer.train()` again."""
    schedule = trainer._schedule.of_length(max(state.max_steps, 1))
    trainer.policy.stepper.scheduler = schedule
    vars(trainer).update(args=args, lr_scheduler=schedule)
    trainer.events.lengthen(args, schedule)


def forget(state: TrainerState, control: TrainerControl, fresh: TrainerState) -> None:
    """Reset the state of an ended run to `fresh`, and clear all flags of `control`. Both objects
    are changed in place, since callbacks and rewards hold references to them."""
    place = {name: getattr(state, name) for name in _PLACE}
    vars(state).update({**vars(fresh), **place})
    vars(control).update(vars(TrainerControl()))
