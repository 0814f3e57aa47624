"""The options of where weights lie that are only read."""

from __future__ import annotations

from dataclasses import dataclass

from rloo.config.option_groups import MEMORY
from rloo.config.options import TrainingOptions


@dataclass(init=False, repr=False, eq=False, kw_only=True)
class MemoryOptions(TrainingOptions):
    """The options before, and those of the reference's memory."""

    # fmt: off
    offload_reference: bool = MEMORY.rloo(False,
        "Keep the reference's layers in CPU memory but for the one that computes.")
    # fmt: on
