"""Checks that all ranks of a run start with equal state, keep equal weights, and end together."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rloo.algorithm.state import TrainerComponents, TrainState
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.distributed.process_exit import no_silent_end
from rloo.distributed.sharded_tensor import shard_count, to_local
from rloo.model.policy import Policy
from rloo.model.training_state import WeightsDiverged, digest
from rloo.tracking.jsonl import versions


@contextmanager
def ranks_in_sync(parts: TrainerComponents, state: TrainState) -> Iterator[None]:
    """Handle stop signals in this block. An error in one process ends the block in all processes.
    No process leaves the block before the main process has saved everything. Raises ValueError if
    an earlier error has left the processes out of sync."""
    parts.world.require_device_groups()
    links = parts.world.collectives
    if links is not None:
        links.signals = parts.stop
        links.where = lambda: f"{parts.clock.current or 'the start'} of step {state.step + 1}"
    try:
        with parts.world.reporting_failure(), parts.stop.handling(), no_silent_end("the run"):
            yield
    finally:
        parts.rollouts.close()
        parts.world.end()


def check_ranks_agree(
    world: World, config: RLOOConfig, policy: Policy, called: Sequence[Any], data: Any
) -> None:
    """Raise ValueError if a process differs from the main process in options, weights, the
    functions `called` (rewards, tools), prompts or versions. The error has both values and
    ranks."""
    if world.collectives is None:
        return
    sources = [_source_of(function) for function in called]
    mine = {
        **{f"the option {name}": repr(value) for name, value in config.to_dict().items()},
        **{f"the version of {name}": value for name, value in versions().items()},
        "the weights": policy.start,
        "the dataset": repr(data),
        "the rewards and tools": _short(repr(sources)),
    }
    main, *others = world.all_gather_object(mine)
    for rank, facts in enumerate(others, start=1):
        for name, value in main.items():
            if facts[name] != value:
                raise ValueError(
                    f"{name}: rank 0 has {value}, rank {rank} has {facts[name]}; all processes of "
                    "a run must start alike"
                )


def check_same_weights(parts: TrainerComponents, state: TrainState) -> bool:
    """Compare the weights of the ranks; raises WeightsDiverged if they differ. Returns whether any
    process has received a request to save."""
    if parts.world.collectives is None:
        return parts.stop.save_wanted
    # Neighbours may have different shards of one copy of the weights.
    shards = max(map(shard_count, parts.policy.parameters))
    found = digest([to_local(p) for p in parts.policy.parameters])
    wants = parts.world.all_gather_object((parts.stop.save_wanted, found))
    for rank, (_, found) in enumerate(wants):
        first = rank % shards
        if found != wants[first][1]:
            raise WeightsDiverged(
                f"after step {state.step} the weights of rank {rank} are not those of rank "
                f"{first}; all start with the same and sum the same gradients, so one "
                "computes wrongly, or a callback has changed them on some alone"
            )
    return any(wanted for wanted, _ in wants)


def _source_of(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # an object, or a function of an interactive session
        return getattr(function, "__name__", type(function).__name__)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
