"""What a run is doing on a pretended GPU: the phases by which waits and launches are counted."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from support.gpu.device import Device

# Functions of the project, and the phase that each is; of nested phases the inner one counts.
PARTS = (
    ("rloo.engines.native.cuda_graphs:CapturedGraph.__call__", "token"),
    ("rloo.engines.native.cuda_graphs:CapturedGraph._record", "capture"),
    ("rloo.model.policy:Policy.batch", "micro_batch"),
    ("rloo.algorithm.update:micro_batch_loss", "micro_batch"),
    ("rloo.model.optimizer_step:PolicyOptimizer.backward", "micro_batch"),
    ("rloo.algorithm.oom_retry:fit_token_budget", "rehearsal"),
    ("rloo.algorithm.oom_retry:verify_packed_forward", "check"),
    ("rloo.trainer.checkpoint_writer:write_checkpoint", "save"),
)


@contextmanager
def counted(device: Device) -> Iterator[None]:
    """Inside, waits and launches are counted by phase: `sample`, `credit`, `update` (the run's own
    clock), in them `token`, `micro_batch` and `capture`; else `other`. `device.steps` has
    how often the host waited in each step's update."""
    from rloo.tracking.profiler import PhaseTimer

    of_clock = PhaseTimer.phase
    device.steps = []

    @contextmanager
    def phase(clock: Any, name: str) -> Iterator[None]:
        before = device.waits_of(name)
        with of_clock(clock, name), device.during(name):
            yield
        if name == "update":
            device.steps.append(device.waits_of(name) - before)

    with ExitStack() as stack:
        stack.enter_context(patch.object(PhaseTimer, "phase", phase))
        for place, name in PARTS:
            owner, attribute = _find(place)
            stack.enter_context(
                patch.object(owner, attribute, _in_phase(device, getattr(owner, attribute), name))
            )
        yield


def _find(place: str) -> tuple[Any, str]:
    module, path = place.split(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def _in_phase(device: Device, function: Any, name: str) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with device.during(name):
            return function(*args, **kwargs)

    return counted
