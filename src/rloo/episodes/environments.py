"""Environments: each episode uses one environment exclusively. All episodes of a group begin in the
same state.

An environment is an object of the user's class, as in TRL: `reset(...)` begins an episode, and the
other public methods are tools. Environments are created once and reused for further episodes. An
environment that has failed is closed and not reused.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rloo import plugins
from rloo.episodes.tool_executor import Asked, ToolExecutor, ToolResult
from rloo.types import Prompt, sound

# Methods that this module calls; they are not tools.
OURS = ("reset", "get_reward", "close")
# Seconds that an environment may take to close, and that a server may take to list its tools.
_CLOSING = 10.0
_LISTING = 60.0


@dataclass(slots=True)
class EnvironmentSlot:
    """An environment for one episode. `said` is the text that `reset` returned, `start` a hash of
    the first `state`, `seconds` the time of reset and tools so far. `failed` is the reason why the
    episode cannot continue; the environment is then not reused."""

    environment: Any = None
    said: str | None = None
    start: str | None = None
    seconds: float = 0.0
    failed: str | None = None
    state: dict[str, Any] = field(default_factory=dict)


class EnvironmentPool:
    """A pool of environments that `factories` create. The column `environment` of a row names its
    factory; a factory named None serves all rows."""

    def __init__(self, factories: Mapping[str | None, Callable[[], Any]]) -> None:
        self._factories = dict(factories)
        self._free: dict[str | None, list[Any]] = {name: [] for name in factories}
        self._caller = ToolExecutor()
        self._lock = threading.Lock()  # episodes in the background take environments, too
        self._around: dict[str | None, type[Any]] = {}
        for name in factories:  # one example per factory has the tools
            self._free[name].append(self._make(name))
        self.examples: dict[str | None, Any] = {name: free[0] for name, free in self._free.items()}
        self.close: weakref.finalize[..., EnvironmentPool] = weakref.finalize(
            self, _close_all, self._free
        )

    def rewards(self) -> list[Callable[..., Any]]:
        """A reward function for each class of environments that has a method `get_reward`."""
        kinds = dict.fromkeys(type(example) for example in self.examples.values())
        return [_reward_of(kind) for kind in kinds if hasattr(kind, "get_reward")]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ValueError for rows without an environment, and for a column `environments`."""
        for prompt in prompts:
            self.name_of(prompt)
            if "environments" in prompt.columns:
                raise ValueError(
                    "the dataset has a column environments, which is what reward functions are "
                    "given the environments as; rename it (dataset, environment_factory)"
                )

    def check_names(self, names: Mapping[int, Any]) -> None:
        """Raise ValueError for unknown names in the column `environment`; `names` maps the number
        of a row to its name."""
        for number, name in names.items():
            self._named(number, name)

    def name_of(self, prompt: Prompt) -> str | None:
        """The name of a row's environment, or None if one factory serves all rows. Raises
        ValueError for an unknown name."""
        return self._named(prompt.id, prompt.columns.get("environment"))

    def _named(self, number: int, name: Any) -> str | None:
        if None in self._factories:
            return None
        if name not in self._factories:
            raise ValueError(
                f"prompt {number} is for the environment {name!r}; there are "
                f"{', '.join(map(str, self._factories))} (environment_factory, and the column "
                "environment)"
            )
        return str(name)

    @contextmanager
    def acquire(
        self, prompts: Sequence[Prompt], counts: Sequence[int], noise: int, seconds: float
    ) -> Iterator[list[list[EnvironmentSlot]]]:
        """Yield for each prompt as many environments as its entry in `counts`, reset with the
        prompt's row and seed. The environments return to the pool afterwards. Raises ValueError if
        environments of one prompt begin in different states."""
        names = [self.name_of(prompt) for prompt in prompts]
        leases: list[list[EnvironmentSlot]] = [[] for _ in prompts]
        try:
            for own, name, count in zip(leases, names, counts, strict=True):
                own += [EnvironmentSlot(self._take(name)) for _ in range(count)]
            asked = [
                (lease, _reset(lease.environment, prompt, noise, chosen=name is not None), seconds)
                for own, prompt, name in zip(leases, prompts, names, strict=True)
                for lease in own
            ]
            calls: list[Asked] = [(function, limit) for _, function, limit in asked]
            for (lease, _, _), outcome in zip(asked, self._caller.call(calls), strict=True):
                _begin(lease, outcome, seconds)
            for prompt, own in zip(prompts, leases, strict=True):
                _require_same(prompt, [lease for lease in own if lease.failed is None])
            yield leases
        finally:
            for own, name in zip(leases, names, strict=True):
                for lease in own:
                    self._give_back(name, lease)

    def _make(self, name: str | None) -> Any:
        environment = self._factories[name]()
        if _is_client(environment):
            if name not in self._around:
                self._around[name] = self._kind_of(environment)
            environment = self._around[name](environment)
        if not callable(getattr(environment, "reset", None)):
            raise ValueError(
                f"an environment of {_named(self._factories[name])} has no method reset, which "
                "begins an episode (environment_factory)"
            )
        return environment

    def _kind_of(self, client: Any) -> type[Any]:
        around = plugins.load("parts", "openenv")
        (outcome,) = self._caller.call([(partial(around, client), _LISTING)])
        if isinstance(outcome.value, type):
            return outcome.value
        _close(plugins.load("parts", "openenv_environment")(client))
        raise outcome.error or ValueError(
            f"the server of {type(client).__name__} did not list its tools within {_LISTING:g} s "
            "(environment_factory)"
        )

    def _take(self, name: str | None) -> Any:
        with self._lock:
            return self._free[name].pop() if self._free[name] else self._make(name)

    def _give_back(self, name: str | None, lease: EnvironmentSlot) -> None:
        if lease.failed is None:
            self._free[name].append(lease.environment)
        else:
            _close(lease.environment)


def environment_tools(environment: Any) -> list[str]:
    """The names of the methods that a model may call: the public ones of the class."""
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return [name for name, _ in methods if name not in OURS and not name.startswith("_")]


def _reward_of(kind: Any) -> Callable[..., Any]:
    """A reward function: the result of `get_reward` for environments whose class is exactly `kind`,
    None for other environments, as in TRL."""

    async def later(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [await e.get_reward() if type(e) is kind else None for e in environments]

    def now(environments: Sequence[Any], **_: Any) -> list[Any]:
        return [e.get_reward() if type(e) is kind else None for e in environments]

    chosen: Callable[..., Any] = later if inspect.iscoroutinefunction(kind.get_reward) else now
    chosen.__name__ = kind.__name__
    return chosen


def _reset(environment: Any, prompt: Prompt, noise: int, *, chosen: bool) -> Callable[[], Any]:
    """The call that begins an episode. `reset` gets the columns of the row that it accepts, and a
    `seed` that is the same for all episodes of a prompt in a rollout. If the column `environment`
    has `chosen` the environment, `reset` does not get that column."""
    digest = hashlib.blake2b(f"{noise}/{prompt.noise_id}".encode(), digest_size=4).digest()
    offered = {"seed": int.from_bytes(digest, "little") >> 1, "prompt": prompt.content}
    offered |= {n: v for n, v in prompt.columns.items() if not (chosen and n == "environment")}
    parameters = inspect.signature(environment.reset).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {p.name for p in parameters}
        offered = {name: value for name, value in offered.items() if name in taken}
    return partial(environment.reset, **offered)


def _begin(lease: EnvironmentSlot, outcome: ToolResult, seconds: float) -> None:
    lease.seconds = outcome.seconds
    if outcome.late:
        lease.failed = f"reset did not end within {seconds:g} s (tool_kwargs.timeout)"
    elif outcome.error is not None:
        lease.failed = f"reset raised {outcome.error!r:.200}"
    elif outcome.value is not None and not isinstance(outcome.value, str):
        raise ValueError(
            f"reset of {type(lease.environment).__name__} returned a "
            f"{type(outcome.value).__name__}; it returns a text to add to the prompt, or None "
            "(environment_factory)"
        )
    else:
        lease.said = sound(outcome.value)
        lease.state = _state_of(lease.environment) | {"what reset returns": lease.said}
        lease.start = hashlib.blake2b(repr(lease.state).encode(), digest_size=8).hexdigest()


def _require_same(prompt: Prompt, leases: Sequence[EnvironmentSlot]) -> None:
    for other in leases[1:]:
        first = leases[0]
        if other.start == first.start:
            continue
        names = [*first.state, *(name for name in other.state if name not in first.state)]
        name = next(n for n in names if first.state.get(n) != other.state.get(n))
        values = (f"{lease.state.get(name)!r:.80}" for lease in (first, other))
        one, two = zip(values, ("in one", "in the other"), strict=True)
        raise ValueError(different_states(prompt.id, name, " ".join(one), " ".join(two)))
    for other in leases[1:]:
        other.state = {}  # equal to the first state


def different_states(prompt: int, name: str, one: str, other: str) -> str:
    """The error text for two environments of a prompt that begin with different values of the
    attribute `name`: `one` and `other`, each with the place where it was found."""
    return (
        f"two environments of prompt {prompt} begin in different states: {name} is {one} and "
        f"{other}; episodes of a group are compared with each other, so reset(seed=...) must set "
        "everything. What may differ, such as a connection, has a name with an underscore "
        "(environment_factory)"
    )


def _state_of(environment: Any) -> dict[str, Any]:
    """The comparable values of an environment's public attributes, sorted by name."""
    attributes = getattr(environment, "__dict__", {})
    return {n: _plain(v) for n, v in sorted(attributes.items()) if not n.startswith("_")}


def _plain(value: Any) -> Any:
    """`value` in a form that is equal for equal values. An object of another type becomes the name
    of its class."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return value.tolist()
    return type(value).__qualname__


def _close_all(free: Mapping[str | None, list[Any]]) -> None:
    for environments in free.values():
        while environments:
            _close(environments.pop())


def _close(environment: Any) -> None:
    """Close an environment. If it has no `close`, close the OpenEnv clients among its
    attributes."""
    close = getattr(environment, "close", None)
    if not callable(close):
        for held in getattr(environment, "__dict__", {}).values():
            if _is_client(held):
                _close(held)
        return
    (outcome,) = ToolExecutor().call([(close, _CLOSING)])
    if outcome.error is not None or outcome.late:
        why = f"took over {_CLOSING:g} s" if outcome.late else f"raised {outcome.error!r:.200}"
        warnings.warn(f"close of {type(environment).__name__} {why}", stacklevel=2)


def _is_client(value: Any) -> bool:
    """Whether `value` is a client of OpenEnv: its class or a base class is in package `openenv`."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return "openenv" in packages and hasattr(value, "connect")


def _named(factory: Any) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
