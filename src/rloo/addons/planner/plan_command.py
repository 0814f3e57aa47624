"""`rloo plan`."""

from __future__ import annotations

import os

from rloo.algorithm.stop_signals import StopSignals
from rloo.config.launcher_env import check_alone
from rloo.trainer.preflight import check_inputs, read_options


def plan(arguments: list[str], signals: StopSignals) -> int:
    """Print the predicted costs of a run, on this machine or on other GPUs."""
    from rloo.addons.planner.gpu.gpu_plan_command import asks_for_gpus, plan_gpus

    if asks_for_gpus(arguments):
        with signals.ending():
            plan_gpus(arguments)
        return 0
    config = read_options(arguments)
    check_inputs(config)
    check_alone("plan")
    # torch reads this at import. Otherwise torch warns about memory before a measurement.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with signals.ending():
        from rloo.addons.planner.plan import make_plan, print_plan

    print_plan(make_plan(config))
    return 0
