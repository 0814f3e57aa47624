"""A trainer that trains once more, as the cell of a notebook that is run twice."""

from __future__ import annotations

import copy
from typing import Any

from transformers import TrainerControl, TrainerState

# What a training does not change.
_PLACE = ("is_world_process_zero", "is_local_process_zero", "is_hyper_param_search")


class Schedule:
    """The learning rates as they were before the first step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = copy.deepcopy(scheduler.state_dict())

    def restart(self) -> None:
        """Begin with those of the first step again."""
        self._scheduler.load_state_dict(copy.deepcopy(self._state))
        rates = self._scheduler.get_last_lr()
        for group, rate in zip(self._scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def forget(state: TrainerState, control: TrainerControl, fresh: TrainerState) -> None:
    """Have the state of a run that has ended be a `fresh` one, and no flag be set. Callbacks and
    rewards keep the objects."""
    place = {name: getattr(state, name) for name in _PLACE}
    vars(state).update({**vars(fresh), **place})
    vars(control).update(vars(TrainerControl()))
