"""Train language models with REINFORCE Leave-One-Out."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "rloo runs on Linux and macOS, not on Windows; there it runs in WSL, a Linux "
        "(docs/platforms.md)"
    )

if TYPE_CHECKING:
    from rloo.algorithm.stop_signals import Stopped
    from rloo.config.config import RLOOArguments, RLOOConfig
    from rloo.trainer.trainer import RLOOTrainer

__version__ = "0.1.0"
__all__ = [
    "RLOOArguments",
    "RLOOConfig",
    "RLOOTrainer",
    "Stopped",
    "__version__",
    "from_verifiers",
]

# If bitsandbytes is installed, peft makes transformers import it. bitsandbytes then warns on stderr
# that an operation, which is not used here, has no fast kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "RLOOArguments": "rloo.config.config",
    "RLOOConfig": "rloo.config.config",
    "RLOOTrainer": "rloo.trainer.trainer",
    "Stopped": "rloo.algorithm.stop_signals",
}


def __getattr__(name: str) -> Any:
    # These names are imported on first use: `rloo --help` must not wait for torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "from_verifiers":
        return importlib.import_module("rloo.plugins").load("parts", name)
    raise AttributeError(f"module rloo has no attribute {name}")
