"""Checks of tools' options, and of options that cannot be combined with tools."""

from __future__ import annotations

from collections.abc import Iterator
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


def check_tools(options: TrainingOptions, *, own: bool = False) -> None:
    """Raise ValueError for the first option that cannot be combined with tools in this version.
    With `own`, the options are checked for a run with a rollout_func."""
    for fault in _faults(options, own):
        raise ValueError(f"{fault} ({'rollout_func' if own else 'tools'})")


def _faults(options: TrainingOptions, own: bool) -> Iterator[str]:
    what = "there is a rollout_func" if own else "there are tools"
    if options.samples_beside:
        yield (
            f"{what} and completions are sampled beside training, by processes that "
            "cannot call them in this version (max_staleness 0 and no sampler_processes)"
        )
