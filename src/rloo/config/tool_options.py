"""Checks of tools' options, and of options that cannot be combined with a rollout_func."""

from __future__ import annotations

from dataclasses import fields

from rloo.config.fields import default_of
from rloo.config.option_groups import TOOLS
from rloo.config.options import TrainingOptions


def refuse_in_vain(options: TrainingOptions) -> None:
    """Raise ValueError for a tool option that is set although there are no tools."""
    for option in fields(TrainingOptions):
        value = getattr(options, option.name)
        if option.metadata["subject"] == TOOLS.name and value != default_of(option):
            raise ValueError(
                f"{option.name} is {value} and there are no tools, without which it has no effect "
                "(tools, environment_factory)"
            )


def check_rollout_func(options: TrainingOptions) -> None:
    """Raise ValueError if the options cannot be combined with a rollout_func in this version."""
    if options.samples_beside:
        raise ValueError(
            "there is a rollout_func and completions are sampled beside training, by processes "
            "that cannot call it in this version (max_staleness 0 and no sampler_processes) "
            "(rollout_func)"
        )
