"""What decides how a run uses an engine, before torch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rloo import plugins


def _nothing(config: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine that `rollout_engine` can name.

    `make` is given `rloo.engines.engine_registry.EngineInputs` and returns the engine and a note
    for the user, or None. `check` raises ValueError for options that the engine cannot do with.
    `own_processes`: it samples in processes of its own, which this process calls, so that it may
    sample while the model is trained. `partial_rollouts`: completions go on with new weights.
    `options`: the group of options that are about it, `vllm` for those whose names begin so."""

    make: Callable[[Any], tuple[Any, str | None]]
    check: Callable[[Any], None] = _nothing
    own_processes: bool = False
    partial_rollouts: bool = False
    options: str = ""


def engine_spec(name: str) -> EngineSpec:
    """The engine of that name. Raises ValueError where there is none."""
    known = plugins.names("engines")
    if name not in known:
        *others, last = known
        raise ValueError(f"engine is {name!r}; it must be {', '.join(others)} or {last}")
    found: EngineSpec = plugins.load("engines", name)
    return found
