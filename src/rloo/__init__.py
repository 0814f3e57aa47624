"""Train language models with REINFORCE Leave-One-Out."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "rloo runs on Linux and macOS, not on Windows; there it runs in WSL, a Linux "
        "(docs/platforms.md)"
    )

if TYPE_CHECKING:
    from rloo.addons.integrations.verifiers import from_verifiers
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

# Where bitsandbytes is installed, peft makes transformers import it, and it warns on stderr that an
# operation that is not used here has no fast kernel.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "RLOOArguments": "rloo.config.config",
    "RLOOConfig": "rloo.config.config",
    "RLOOTrainer": "rloo.trainer.trainer",
    "Stopped": "rloo.algorithm.stop_signals",
    "from_verifiers": "rloo.addons.integrations.verifiers",
}


class _Later(ModuleType):
    """A library that is loaded when something of it is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by those who look through all modules
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def quickly() -> Iterator[None]:
    """Have a block import in about 60 % of the time: without collecting garbage, of which imports
    leave none, and without bitsandbytes, which peft imports where it is installed, and which has
    torch load its compiler. Whoever needs it loads it then."""
    name, collects = "bitsandbytes", gc.isenabled()
    found = None if name in sys.modules else importlib.util.find_spec(name)
    if found is not None:
        later = _Later(name)
        later.__spec__ = found
        sys.modules[name] = later
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `rloo --help` does not wait for torch.
    if name in _HOMES:
        with quickly():
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module rloo has no attribute {name}")
