"""Train language models with REINFORCE Leave-One-Out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloo.algorithm.interrupts import Stopped
    from rloo.config.config import RLOOArguments, RLOOConfig
    from rloo.run.trainer import RLOOTrainer

__version__ = "0.1.0"
__all__ = ["RLOOArguments", "RLOOConfig", "RLOOTrainer", "Stopped", "__version__"]

# Where bitsandbytes is installed, peft makes transformers import it, and it warns on stderr that an
# operation that is not used here has no fast kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "RLOOArguments": "rloo.config.config",
    "RLOOConfig": "rloo.config.config",
    "RLOOTrainer": "rloo.run.trainer",
    "Stopped": "rloo.algorithm.interrupts",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `rloo --help` does not wait for torch.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module rloo has no attribute {name}")
