"""Calls reward functions in TRL's convention and sums their rewards."""

# Over 400 lines: a reward set is called, limited in time, combined and measured in one place.
from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rloo.distributed.standard_streams import IS, counted
from rloo.rewards.async_functions import LoopThread
from rloo.rewards.reward_function import (
    LARGEST,
    RESERVED,
    Reward,
    RewardLog,
    check_state,
    make_arguments,
    name_of,
    read_rewards,
    read_signature,
    share_of_nan,
)
from rloo.rewards.state_guard import blame, keep_state, said_by
from rloo.rewards.timeout import (
    RewardTimeout,
    call_with_timeout,
    process_ends_after,
)
from rloo.types import Text


@dataclass(frozen=True, slots=True)
class RawScores:
    """The rewards and logs of one call of each function, by the function's name. The rewards are
    None if the call failed and `on_error` is `missing`. There are `count` completions, of which the
    functions received `seen` (None: all)."""

    count: int
    by_function: dict[str, list[float | None] | None]
    logs: dict[str, RewardLog]
    seen: int | None = None

    def among(self, places: Sequence[int], count: int) -> RawScores:
        """Return these scores as the scores of `count` completions. `places` are the indices of the
        completions with scores; other completions get None."""

        def spread(values: list[Any]) -> list[Any]:
            known = dict(zip(places, values, strict=True))
            return [known.get(place) for place in range(count)]

        return RawScores(
            count,
            {n: values and spread(values) for n, values in self.by_function.items()},
            {
                name: RewardLog(
                    {c: spread(values) for c, values in log.extras.items()}, log.metrics
                )
                for name, log in self.logs.items()
            },
            self.count,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of N completions; every list has N entries. An entry of `totals` is the weighted
    sum over the functions that returned a number for the completion; None if no function did.
    `extras` are the columns logged with `log_extra`, `metrics` the means of values logged with
    `log_metric`."""

    totals: list[float | None]
    by_function: dict[str, list[float | None]]
    extras: dict[str, list[Any]]
    metrics: dict[str, float]


class RewardSet:
    """Reward functions with their names and weights, called together.

    A function gets the arguments that its signature names: `prompts`, `completions`,
    `completion_ids`, any dataset column, `trainer_state`, `log_extra(column, values)`,
    `log_metric(name, value)`; with `**kwargs` it gets all of them. A function returns one number
    per completion, or None or nan if it does not apply to the completion. Coroutine functions run
    concurrently in one event loop, which exists as long as the set. Other functions run one after
    another, in the caller's thread if it is the main thread. `timeout` is the deadline of one call
    in seconds (None or 0: no limit). `on_error` applies to a call that misses the deadline, raises,
    returns an invalid reward or changes the state of the process. `raise` ends the run; `missing`
    issues a warning and scores None.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        timeout: float | None = None,
        on_error: Literal["raise", "missing"] = "raise",
        sources: Sequence[Any] | None = None,
    ) -> None:
        """`sources` are the specs from which `load_reward` can load each function again (None:
        unknown). Raises ValueError if there is no function, if a function cannot be called with
        keyword arguments, or if there is not one weight or name per function. Equal names get `_2`,
        `_3`, ... appended."""
        if not functions:
            raise ValueError("there is no reward function; at least one is needed (reward_funcs)")
        weights = [1.0] * len(functions) if weights is None else weights
        names = [name_of(function) for function in functions] if names is None else names
        for values, option in ((weights, "reward_weights"), (names, "names")):
            if len(values) != len(functions):
                raise ValueError(
                    f"{option} has {len(values)} entries for {len(functions)} reward functions; "
                    "each function needs one"
                )
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"reward_weights is {list(weights)}; weights need to be finite")
        named = zip(functions, _make_distinct(names), weights, strict=True)
        self._rewards = [read_signature(f, name, float(w)) for f, name, w in named]
        self.timeout: float | None = timeout if timeout and math.isfinite(timeout) else None
        self.on_error: Literal["raise", "missing"] = on_error
        self.sources: list[Any] = list(sources or [None] * len(functions))
        # Arguments besides columns that functions may take, if completions are episodes.
        self.offered: tuple[str, ...] = ()
        self._loop: LoopThread | None = None

    @property
    def names(self) -> list[str]:
        """The functions' distinct names in metrics."""
        return [reward.name for reward in self._rewards]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions as they were passed."""
        return [reward.function for reward in self._rewards]

    @property
    def required(self) -> tuple[str, ...]:
        """The names of all required parameters of the functions."""
        return tuple(dict.fromkeys(name for reward in self._rewards for name in reward.requires))

    def reads(self, column: str) -> bool:
        """Return whether a function has a parameter named `column`."""
        return any(column in (*(r.accepts or ()), *r.requires) for r in self._rewards)

    def check(self, columns: Iterable[str]) -> None:
        """Raise ValueError for errors that the first call would raise: required parameters that are
        no columns, columns with reserved names, and errors of a function's method
        `check_columns(columns)`."""
        columns = list(columns)
        for column in columns:
            if column in RESERVED:
                raise ValueError(
                    f"the dataset column {column!r} has the name of an argument that every reward "
                    "function gets; rename the column"
                )
        given = {*RESERVED, *columns, *self.offered}
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

        Every function gets separate copies of the lists and of lists and dictionaries within them.
        With `learn`, a function's method `normalize(scores)` puts its scores on a running scale.
        Without `learn`, as in evaluations, no state changes, so that scores can be compared over
        the run. Raises ValueError with function, row and value for a wrong number of rewards or for
        a reward that is not finite. Raises TimeoutError for a call that misses the deadline. Raises
        NotAllowed for a call that exits or changes the state of the process or of the trainer.
        Exceptions of a function are passed on with a note that names the function.
        """
        raw = self.call(prompts, completions, completion_ids, columns, trainer_state)
        return self.combine([raw], learn=learn)

    @property
    def reads_state(self) -> bool:
        """Whether a function receives the trainer's state."""
        return any(r.accepts is None or "trainer_state" in r.accepts for r in self._rewards)

    @property
    def shared(self) -> bool:
        """Whether each rank may score its share of the groups. False if a function has `state_dict`
        and no `normalize`: this function gets all completions in one call, on the main rank."""
        keeping = {name for name, _ in self._having("state_dict")}
        return not keeping - {name for name, _ in self._having("normalize")}

    def call(
        self,
        prompts: list[Text],
        completions: list[Text],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        trainer_state: Any,
    ) -> RawScores:
        """Call the functions and check their return values: the first half of `score`."""
        self.check(columns)
        given: dict[str, list[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            **columns,
        }
        count = len(completions)
        for name, values in given.items():
            if len(values) != count:
                raise ValueError(f"{name!r} has {len(values)} rows for {count} completions")
        logs = {reward.name: RewardLog() for reward in self._rewards}
        arguments = {
            reward.name: make_arguments(reward, given, trainer_state, logs[reward.name])
            for reward in self._rewards
        }
        results = self._call(arguments)
        by_function: dict[str, list[float | None] | None] = {}
        for name in self.names:
            state = arguments[name].get("trainer_state"), trainer_state
            rewards = self._catch(partial(_read, name, results[name], count, state))
            failed = isinstance(rewards, Exception)
            if failed:
                warnings.warn(
                    f"{_describe(rewards)}; {counted(count, 'reward', IS)} missing", stacklevel=2
                )
                logs[name] = RewardLog()
            if self.on_error == "missing":
                logs[name].log_metric(f"rewards/{name}/failed", failed)
            if not failed and (share := share_of_nan(results[name])):
                logs[name].log_metric(f"rewards/{name}/nan", share)
            by_function[name] = None if failed else rewards
        return RawScores(count, by_function, logs)

    def combine(self, parts: Sequence[RawScores], *, learn: bool = True) -> Scores:
        """Combine separately scored parts, in their order: the second half of `score`."""
        count = sum(part.count for part in parts)
        by_function: dict[str, list[float | None]] = {name: [] for name in self.names}
        extras: dict[str, list[Any]] = {}
        logged: dict[str, list[tuple[int, list[float]]]] = {}
        before = 0
        for part in parts:
            for name, known in by_function.items():
                known += part.by_function[name] or [None] * part.count
            for column, values in _extras(part).items():
                extras.setdefault(column, [None] * count)[before : before + part.count] = values
            for name, numbers in _metrics(part).items():
                seen = part.count if part.seen is None else part.seen
                logged.setdefault(name, []).append((seen, numbers))
            before += part.count
        for name, function in self._having("normalize") if learn else ():
            if known := [raw for raw in by_function[name] if raw is not None]:
                logged[f"rewards/{name}/raw_mean"] = [(count, known)]
            by_function[name] = function.normalize(by_function[name])
        weights = [reward.weight for reward in self._rewards]
        totals = [_sum_weighted(row, weights) for row in zip(*by_function.values(), strict=True)]
        _require_finite(totals)
        means = {name: _as_one_call(calls) for name, calls in logged.items()}
        return Scores(totals, by_function, extras, means)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all functions with `state_dict`, by name, as JSON values."""
        return {name: function.state_dict() for name, function in self._having("state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, for every function that `state` names."""
        for name, function in self._having("state_dict"):
            if name in state:
                function.load_state_dict(state[name])

    def close(self) -> None:
        """Stop the event loop of the coroutine functions; the next call starts a new one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _having(self, method: str) -> list[tuple[str, Any]]:
        return [(r.name, r.function) for r in self._rewards if hasattr(r.function, method)]

    def _call(self, arguments: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The return value of each function, or the Exception that ended its call."""
        results = {}
        for reward in self._rewards:
            if not reward.is_async:
                call = partial(self._call_one, reward, arguments[reward.name])
                results[reward.name] = self._catch(call)
        pending = [reward for reward in self._rewards if reward.is_async]
        if pending:
            answers = self._catch(partial(self._call_together, pending, arguments))
            failed = isinstance(answers, Exception)
            results |= {r.name: answers if failed else answers[r.name] for r in pending}
        return results

    def _catch(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # a user's function may raise anything
            if self.on_error == "raise":
                error.in_run = True  # type: ignore[attr-defined]  # not an error of the input
                raise
            return error

    def _call_one(self, reward: Reward, arguments: dict[str, Any]) -> Any:
        with keep_state(repr(reward.name)), blame(reward.name, self.timeout):
            return call_with_timeout(self.timeout, partial(reward.function, **arguments))

    def _call_together(
        self, rewards: Sequence[Reward], arguments: Mapping[str, dict[str, Any]]
    ) -> dict[str, Any]:
        if self._loop is None:
            self._loop = LoopThread()
            weakref.finalize(self, self._loop.close)
        calls = {r.name: partial(r.function, **arguments[r.name]) for r in rewards}
        until = FIRST_EXCEPTION if self.on_error == "raise" else ALL_COMPLETED
        with keep_state(" or ".join(map(repr, calls))), process_ends_after(self.timeout):
            done, late = self._loop.run(
                calls, self.timeout, partial(blame, seconds=self.timeout), until
            )
        if late and not self._loop.responds():
            self.close()
        results = {name: self._catch(future.result) for name, future in done.items()}
        return results | {name: self._catch(partial(self._miss, name)) for name in late}

    def _miss(self, name: str) -> None:
        with blame(name, self.timeout):
            raise RewardTimeout


def _make_distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        candidate, count = name, 1
        while candidate in distinct:
            count += 1
            candidate = f"{name}_{count}"
        distinct.append(candidate)
    return distinct


def _read(name: str, result: Any, count: int, state: tuple[Any, Any]) -> list[float | None]:
    """The rewards of one call. `state` is (the function's copy, the trainer's state)."""
    if isinstance(result, Exception):
        raise result
    check_state(name, *state)
    return read_rewards(result, name, count)


def _describe(error: Exception) -> str:
    """An error in one line, with the notes that name the function."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {said_by(error)}{notes}"


def _sum_weighted(row: Sequence[float | None], weights: Sequence[float]) -> float | None:
    terms = [w * reward for reward, w in zip(row, weights, strict=True) if reward is not None]
    return sum(terms) if terms else None


def _require_finite(totals: Sequence[float | None]) -> None:
    for row, total in enumerate(totals):
        if total is not None and not abs(total) <= LARGEST:
            raise ValueError(
                f"the weighted rewards of completion {row} add up to {total:g}; a reward is a "
                "finite number of float32 (reward_weights)"
            )


def _metrics(part: RawScores) -> dict[str, list[float]]:
    merged: dict[str, list[float]] = {}
    for log in part.logs.values():
        for name, numbers in log.metrics.items():
            merged.setdefault(name, []).extend(numbers)
    return merged


def _as_one_call(calls: Sequence[tuple[int, list[float]]]) -> float:
    """The mean of the values that several calls logged, as if one call had logged them. If all
    calls logged the same number of values, each call's mean is weighted by its completions.
    Otherwise all values have the same weight."""
    if len(calls) > 1 and len({len(numbers) for _, numbers in calls}) == 1:
        weighted = [count * sum(numbers) / len(numbers) for count, numbers in calls]
        return sum(weighted) / sum(count for count, _ in calls)
    flat = [number for _, numbers in calls for number in numbers]
    return sum(flat) / len(flat)


def _extras(part: RawScores) -> dict[str, list[Any]]:
    merged: dict[str, list[Any]] = {}
    for name, log in part.logs.items():
        for column, values in log.extras.items():
            if len(values) != part.count or column in merged:
                raise ValueError(
                    f"the reward function {name!r} logged {len(values)} values of {column!r} for "
                    f"{part.count} completions; log_extra takes one per completion, and a column "
                    "comes from one function"
                )
            merged[column] = values
    return merged
