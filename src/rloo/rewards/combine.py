"""Calls reward functions in TRL's convention and sums what they return."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rloo.rewards import calling
from rloo.rewards.calling import RESERVED, Log, Reward
from rloo.types import Text


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of N completions; every list has N entries. `totals` are weighted sums over the
    functions that returned a number, None where none did. `extras` are the columns logged with
    `log_extra`, `metrics` the means of values logged with `log_metric`."""

    totals: list[float | None]
    by_function: dict[str, list[float | None]]
    extras: dict[str, list[Any]]
    metrics: dict[str, float]


class RewardSet:
    """Reward functions with their names and weights, called together.

    A function gets the arguments that its signature names: `prompts`, `completions`,
    `completion_ids`, any dataset column, `trainer_state`, `log_extra(column, values)`,
    `log_metric(name, value)`; with `**kwargs` it gets all of them. It returns one number per
    completion, None or nan where it does not apply. Coroutine functions run together in one loop.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Raises ValueError if there is no function, if one cannot be called by name, or if weights
        or names are not one per function. Equal names get `_2`, `_3`, ... appended."""
        if not functions:
            raise ValueError("there is no reward function; at least one is needed (reward_funcs)")
        weights = [1.0] * len(functions) if weights is None else weights
        names = [calling.name_of(function) for function in functions] if names is None else names
        for values, option in ((weights, "reward_weights"), (names, "names")):
            if len(values) != len(functions):
                raise ValueError(
                    f"{option} has {len(values)} entries for {len(functions)} reward functions; "
                    "each function needs one"
                )
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"reward_weights is {list(weights)}; weights need to be finite")
        named = zip(functions, _make_distinct(names), weights, strict=True)
        self._rewards = [calling.read_signature(f, name, float(w)) for f, name, w in named]
        self._loop: _LoopThread | None = None

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self._rewards]

    def check(self, columns: Iterable[str]) -> None:
        """Raise ValueError for what would fail at the first call: required parameters that are no
        columns, columns with reserved names, and a function's own `check_columns(columns)`."""
        columns = list(columns)
        for column in columns:
            if column in RESERVED:
                raise ValueError(
                    f"the dataset column {column!r} has the name of an argument that every reward "
                    "function gets; rename the column"
                )
        given = {*RESERVED, *columns}
        for reward in self._rewards:
            missing = [name for name in reward.requires if name not in given]
            if missing:
                raise ValueError(
                    f"the reward function {reward.name!r} requires the parameter {missing[0]!r}, "
                    "which is neither a dataset column "
                    f"({', '.join(columns) or 'there are none'}) nor one of {', '.join(RESERVED)}"
                )
            if hasattr(reward.function, "check_columns"):
                reward.function.check_columns(columns)

    def score(
        self,
        prompts: list[Text],
        completions: list[Text],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        trainer_state: Any,
        *,
        learn: bool = True,
    ) -> Scores:
        """Score N completions; every list, in `columns` too, has one entry per completion.

        Every function gets its own copies of the lists and of lists and dictionaries within them.
        With `learn`, a function's own `normalize(scores)` puts its scores on a running scale.
        Without it, as in evaluation, no state changes, so that scores can be compared over the run.
        Raises ValueError with function, row and value for a wrong number of rewards or for a reward
        that is not finite. Exceptions of a function are passed on with a note that names it.
        """
        self.check(columns)
        given: dict[str, list[Any]] = {"prompts": prompts, "completions": completions}
        given |= {"completion_ids": completion_ids, **columns}
        count = len(completions)
        for name, values in given.items():
            if len(values) != count:
                raise ValueError(f"{name!r} has {len(values)} rows for {count} completions")
        logs = {reward.name: Log() for reward in self._rewards}
        results = self._call(
            {
                reward.name: calling.make_arguments(reward, given, trainer_state, logs[reward.name])
                for reward in self._rewards
            }
        )
        by_function = {n: calling.read_rewards(results[n], n, count) for n in self.names}
        for name, function in self._having("normalize") if learn else ():
            for raw in by_function[name]:
                if raw is not None:
                    logs[name].log_metric(f"rewards/{name}/raw_mean", raw)
            by_function[name] = function.normalize(by_function[name])
        weights = [reward.weight for reward in self._rewards]
        totals = [_sum_weighted(row, weights) for row in zip(*by_function.values(), strict=True)]
        return Scores(totals, by_function, _merge_extras(logs, count), _mean(logs))

    def state_dict(self) -> dict[str, Any]:
        """The state of all functions that have one, by name, as JSON values."""
        return {name: function.state_dict() for name, function in self._having("state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, for every function whose name is in it."""
        for name, function in self._having("state_dict"):
            if name in state:
                function.load_state_dict(state[name])

    def close(self) -> None:
        """End the event loop of the coroutine functions; the next call starts a new one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _having(self, method: str) -> list[tuple[str, Any]]:
        return [(r.name, r.function) for r in self._rewards if hasattr(r.function, method)]

    def _call(self, arguments: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        results = {}
        for reward in self._rewards:
            if not reward.is_async:
                with _note(reward.name):
                    results[reward.name] = reward.function(**arguments[reward.name])
        pending = [reward for reward in self._rewards if reward.is_async]
        if pending:
            if self._loop is None:
                self._loop = _LoopThread()
                weakref.finalize(self, self._loop.close)
            answers = self._loop.run(_gather(pending, arguments))
            results.update(zip((reward.name for reward in pending), answers, strict=True))
        return results


class _LoopThread:
    """An event loop in a thread of its own, as the caller may already run a loop (in a notebook);
    kept between calls, as the clients of a coroutine function are bound to their first loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C nothing may continue in the background

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _gather(rewards: Sequence[Reward], arguments: Mapping[str, dict[str, Any]]) -> list[Any]:
    async def call(reward: Reward) -> Any:
        with _note(reward.name):
            return await reward.function(**arguments[reward.name])

    tasks = [asyncio.ensure_future(call(reward)) for reward in rewards]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _note(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # any error is passed on with the function's name added
        error.add_note(f"raised by the reward function {name!r}")
        raise


def _make_distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in distinct:
            count += 1
            candidate = f"{name}_{count}"
        distinct.append(candidate)
    return distinct


def _sum_weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    terms = [w * reward for reward, w in zip(row, weights, strict=True) if reward is not None]
    return sum(terms) if terms else None


def _merge_extras(logs: Mapping[str, Log], count: int) -> dict[str, list[Any]]:
    merged: dict[str, list[Any]] = {}
    for name, log in logs.items():
        for column, values in log.extras.items():
            if len(values) != count or column in merged:
                raise ValueError(
                    f"the reward function {name!r} logged {len(values)} values of {column!r} for "
                    f"{count} completions; log_extra takes one per completion, and a column comes "
                    "from one function"
                )
            merged[column] = values
    return merged


def _mean(logs: Mapping[str, Log]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for log in logs.values():
        for name, logged in log.metrics.items():
            values.setdefault(name, []).extend(logged)
    return {name: sum(logged) / len(logged) for name, logged in values.items()}
