"""One call of one reward function: what it may be given, and what it may give back.

The argument names are TRL's. Knows nothing about other functions, weights or event loops.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESERVED = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
)


@dataclass(frozen=True, slots=True)
class Reward:
    """A function and what it can be given by name; `accepts` is `None` for everything."""

    name: str
    function: Callable[..., Any]
    weight: float
    requires: tuple[str, ...]
    accepts: frozenset[str] | None

    @property
    def is_async(self) -> bool:
        call = getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async call)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)


@dataclass(slots=True)
class Log:
    """Collects what one function logs during one call."""

    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        if isinstance(values, str):
            raise ValueError(f"log_extra({column!r}, ...) got a string; it takes a list of values")
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        number = _unwrap(value)
        if not isinstance(number, numbers.Real):
            raise ValueError(f"log_metric({name!r}, ...) got {value!r}; it takes a number")
        self.metrics.setdefault(name, []).append(float(number))


def read_signature(function: Callable[..., Any], name: str, weight: float) -> Reward:
    """What a reward function accepts and requires by name. Raises ValueError where it cannot be
    called by name at all."""
    if not callable(function):
        raise ValueError(f"the reward {function!r} is a {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the reward function {name!r} has no readable signature; wrap it in a def that takes "
            "completions"
        ) from error
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(
                f"the parameter {parameter.name!r} of the reward function {name!r} is "
                "positional-only; reward functions are called by name"
            )
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return Reward(
        name=name,
        function=function,
        weight=weight,
        requires=tuple(p.name for p in by_name if p.default is p.empty),
        accepts=None if takes_all else frozenset(p.name for p in by_name),
    )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in metrics: its own, or that of its class."""
    function = getattr(function, "func", function)  # functools.partial
    return getattr(function, "__name__", type(function).__name__)


def make_arguments(
    reward: Reward, given: Mapping[str, list[Any]], trainer_state: Any, log: Log
) -> dict[str, Any]:
    """The keyword arguments that `reward` accepts, as copies that it may change."""

    def accepts(name: str) -> bool:
        return reward.accepts is None or name in reward.accepts

    arguments = {name: _copy(values) for name, values in given.items() if accepts(name)}
    others = {
        "trainer_state": trainer_state,
        "log_extra": log.log_extra,
        "log_metric": log.log_metric,
    }
    return arguments | {name: value for name, value in others.items() if accepts(name)}


def _copy(value: Any) -> Any:
    """New lists and dictionaries around the same leaves: the completions of a group share their
    prompt's columns, and a reward that pops from one must not change the next."""
    if isinstance(value, list):
        # Leaves are tested here: a call per token id would cost more than most rewards.
        return [_copy(v) if isinstance(v, (list, dict)) else v for v in value]
    if isinstance(value, dict):
        return {key: _copy(v) for key, v in value.items()}
    return value


def _unwrap(value: Any) -> Any:
    """A numpy scalar or 0-d array or tensor as the Python number that it holds."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def read_rewards(result: Any, name: str, count: int) -> list[float | None]:
    """What a reward function returned, as `count` numbers or None. Raises ValueError that names the
    function, the row and the value."""
    if getattr(result, "ndim", None) == 1 and hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(
            f"the reward function {name!r} returned {_show(result)}, not a list of {count} numbers"
        )
    if len(result) != count:
        raise ValueError(
            f"the reward function {name!r} returned {len(result)} rewards for {count} completions; "
            "each completion needs one, None where the function does not apply"
        )
    return [_read_reward(value, name, row) for row, value in enumerate(result)]


def _read_reward(value: Any, name: str, row: int) -> float | None:
    number = _unwrap(value)
    if number is None:
        return None
    if isinstance(number, numbers.Real):
        try:
            reward = float(number)
        except OverflowError:  # an integer beyond the largest float
            reward = math.inf
        if math.isnan(reward):
            return None
        if math.isfinite(reward):
            return reward
    raise ValueError(
        f"the reward function {name!r} returned {_show(value)} for completion {row}; a reward is a "
        "finite number, or None where it does not apply"
    )


def _show(value: Any) -> str:
    text = repr(value) if isinstance(value, float) else f"{type(value).__name__}: {value!r}"
    text = " ".join(text.split())
    return f"{text[:100]}..." if len(text) > 100 else text
