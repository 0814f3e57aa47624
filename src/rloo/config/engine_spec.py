"""Properties of engines that a run needs before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo import plugins


def _nothing(config: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The properties of an engine that `rollout_engine` can name.

    `make` receives `rloo.engines.engine_registry.EngineInputs` and returns the engine, and a note
    for the user or None. `check` raises ValueError for options that the engine does not support.
    `own_processes`: the engine samples in separate processes, so it can sample while the model
    trains. `partial_rollouts`: unfinished completions can continue with new weights. `options`: the
    prefix of the options for this engine, such as `vllm`."""

    make: Callable[[Any], tuple[Any, str | None]]
    check: Callable[[Any], None] = _nothing
    own_processes: bool = False
    partial_rollouts: bool = False
    options: str = ""


def engine_spec(name: str) -> EngineSpec:
    """The spec of the engine `name`. Raises ValueError for an unknown name."""
    known = plugins.names("engines")
    if name not in known:
        *others, last = known
        raise ValueError(f"engine is {name!r}; it must be {', '.join(others)} or {last}")
    found: EngineSpec = plugins.load("engines", name)
    return found
