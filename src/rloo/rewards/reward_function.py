"""One call of one reward function: its arguments (named as in TRL) and its return values."""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloo.config.user_functions import NotAllowed
from rloo.rewards.async_functions import is_coroutine
from rloo.rewards.state_guard import show

# The largest float32. Advantages are float32: a larger reward would become infinite.
LARGEST = 3.4028234663852886e38
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, and the argument names that it requires and accepts (None: any name)."""

    name: str
    function: Callable[..., Any]
    weight: float
    requires: tuple[str, ...]
    accepts: frozenset[str] | None

    @property
    def is_async(self) -> bool:
        """Whether a call of the function must be awaited."""
        return is_coroutine(self.function)


@dataclass(slots=True)
class RewardLog:
    """Collects the extras and metrics that one function logs during one call."""

    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log one value per completion. Raises ValueError for a string in place of a list."""
        if isinstance(values, str):
            raise ValueError(f"log_extra({column!r}, ...) got a string; it takes a list of values")
        self.extras.setdefault(column, []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Log a number. The step's metric `name` is the mean of all logged numbers. Raises
        ValueError for another type."""
        number = _unwrap(value)
        if not isinstance(number, numbers.Real):
            raise ValueError(f"log_metric({name!r}, ...) got {show(value)}; it takes a number")
        self.metrics.setdefault(name, []).append(float(number))


def read_signature(function: Callable[..., Any], name: str, weight: float) -> Reward:
    """Return a `Reward` with the arguments that `function` takes. Raises ValueError if the function
    cannot be called with keyword arguments."""
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
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ValueError(
                f"the parameter {p.name!r} of the reward function {name!r} is positional-only; "
                "reward functions are called by name"
            )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    requires = tuple(p.name for p in by_name if p.default is p.empty)
    accepts = None if takes_all else frozenset(p.name for p in by_name)
    return Reward(name, function, weight, requires, accepts)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a reward function in metrics: its `__name__`, or its class's name."""
    function = getattr(function, "func", function)  # functools.partial
    return getattr(function, "__name__", type(function).__name__)


def make_arguments(
    reward: Reward, given: Mapping[str, list[Any]], trainer_state: Any, log: RewardLog
) -> dict[str, Any]:
    """Return the keyword arguments that `reward` accepts. Lists and the trainer's state are copied,
    so that the function may change them without an effect on the run."""
    logs = {"log_extra": log.log_extra, "log_metric": log.log_metric}
    offered = {**given, "trainer_state": trainer_state, **logs}
    accepts = offered.keys() if reward.accepts is None else reward.accepts
    copies = {name: _copy(value) for name, value in offered.items() if name in accepts}
    if "trainer_state" in copies:
        copies["trainer_state"] = _copy_state(trainer_state)
    return copies


def check_state(name: str, seen: Any, trainer_state: Any) -> None:
    """Raise NotAllowed if the function `name` set an attribute of `seen`, its copy of the trainer's
    state: the change would have no effect. The lists and dictionaries of the copy may be
    changed."""
    for key, value in getattr(seen, "__dict__", {}).items():
        known = getattr(trainer_state, key, None)
        if value is not known and not isinstance(known, (list, dict)):
            raise NotAllowed(
                f"the reward function {name!r} set trainer_state.{key} from {show(known, 60)} to "
                f"{show(value, 60)}; the state belongs to the run, a reward function reads it"
            )


def _copy_state(state: Any) -> Any:
    copied = copy.copy(state)
    for key, value in getattr(state, "__dict__", {}).items():
        setattr(copied, key, _copy(value))
    return copied


def _copy(value: Any) -> Any:
    """Copy lists and dictionaries, but not leaves. Completions of a group share columns."""
    if isinstance(value, list):
        # The test is here: a function call per token id would take longer than most rewards.
        return [_copy(v) if isinstance(v, (list, dict)) else v for v in value]
    if isinstance(value, dict):
        return {key: _copy(v) for key, v in value.items()}
    return value


def _unwrap(value: Any) -> Any:
    """Convert a numpy scalar, 0-d array or 0-d tensor to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def read_rewards(result: Any, name: str, count: int) -> list[float | None]:
    """Check the return value of a reward function and convert it to `count` floats or None. Raises
    ValueError that names the function, the row and the value."""
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


def share_of_nan(result: Any) -> float:
    """Return the share of a reward function's return values that are NaN, which is no reward."""
    values = [_unwrap(value) for value in result]
    numbers_of = [value for value in values if isinstance(value, numbers.Real)]
    return sum(value != value for value in numbers_of) / max(1, len(values))


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
        if abs(reward) <= LARGEST:
            return reward
    raise ValueError(
        f"the reward function {name!r} returned {_show(value)} for completion {row}; a reward is a "
        "finite number (of float32), or None where it does not apply"
    )


def _show(value: Any) -> str:
    return show(value) if isinstance(value, float) else f"{type(value).__name__}: {show(value)}"
