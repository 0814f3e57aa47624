"""Checks of tools' options."""

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
