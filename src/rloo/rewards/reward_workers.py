"""Reward functions in processes beside a run, so that groups are scored while others are sampled.

What a function is travels once: a name, which is loaded anew there, or a function as dill writes
it. Nothing that comes back is more than JSON.
"""

from __future__ import annotations

import inspect
import io
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import dill

from rloo.distributed.standard_streams import IS, counted
from rloo.distributed.worker_pool import WorkerPool
from rloo.distributed.worker_process import Worker, WorkerDied
from rloo.distributed.worker_registry import WorkerRegistry, acquire_worker
from rloo.rewards.registry import load_reward
from rloo.rewards.reward_function import RewardLog
from rloo.rewards.reward_set import RawScores, RewardSet
from rloo.rewards.state_guard import describe_timeout, show
from rloo.rewards.timeout import GRACE_SECONDS
from rloo.types import Text

# A function that drags more than this along has a model or a dataset in it.
MOST_BYTES = 2**26
START_SECONDS = 120.0
# For one that somebody else starts, perhaps on a machine that is not up yet.
COME_SECONDS = 1800.0
# The status with which faulthandler ends a process whose function ignores its deadline.
_LATE = 1


class RewardWorkerPool:
    """Processes that score groups, `size` side by side, each by calls of all functions. What a
    function keeps in its module it keeps in each of them. Close it to end them."""

    def __init__(self, rewards: RewardSet, size: int, hub: WorkerRegistry | None = None) -> None:
        """Without a `hub`, that they come to, they are started here. Raises ValueError where
        `unavailable_reason` has a reason."""
        if (reason := unavailable_reason(rewards)) is not None:
            raise ValueError(reason)
        setup = written((_parts(rewards), rewards.names, rewards.timeout, rewards.on_error))
        self._crew = WorkerPool(size, partial(acquire_worker, "score", setup, hub, COME_SECONDS))
        self._names, self._timeout = rewards.names, rewards.timeout
        self._missing = rewards.on_error == "missing"
        for _ in range(size):  # they start while the first group is sampled
            self._crew.submit(lambda worker: worker.call(b"", START_SECONDS))
        self.close = self._crew.close

    def submit(
        self, seed: int, make: Callable[[], Sequence[Any]], state: bytes = b""
    ) -> Future[tuple[list[Text], RawScores]]:
        """Score what `make` returns: the arguments of `RewardSet.call`, without the trainer's
        state, which is given as `written`. The global generators are seeded by `seed`. The
        completions and what was said of them."""

        def job(worker: Worker) -> tuple[list[Text], RawScores]:
            arguments = tuple(make())  # here, since it takes time
            message = written((seed, arguments, state))
            return arguments[1], self._score(message, len(arguments[1]), worker)

        return self._crew.submit(job)

    def _score(self, message: bytes, count: int, worker: Worker) -> RawScores:
        began, seconds = time.monotonic(), None
        if self._timeout:
            seconds = START_SECONDS + len(self._names) * (self._timeout + 2 * GRACE_SECONDS)
        try:
            return _of_json(worker.call(message, seconds))
        except WorkerDied as lost:
            late = self._timeout and time.monotonic() - began >= self._timeout
            if not late or lost.status not in (None, _LATE):
                raise  # it is done again
            if len(self._names) == 1:
                said = describe_timeout(self._names[0], self._timeout)
            else:
                said = f"of {', '.join(self._names)}: {describe_timeout('one', self._timeout)}"
            if not self._missing:
                raise TimeoutError(said) from lost
            warnings.warn(f"{said}; {counted(count, 'reward', IS)} missing", stacklevel=2)
            logs = {name: RewardLog() for name in self._names}
            for name, log in logs.items():
                log.log_metric(f"rewards/{name}/failed", True)
            return RawScores(count, dict.fromkeys(self._names), logs)

    def cancel_pending(self) -> None:
        """Give up what was begun and waits."""
        self._crew.cancel_pending()

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._crew.size

    @property
    def lost(self) -> int:
        """How many were lost so far."""
        return self._crew.lost

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return self._crew.pids

    def busy_seconds(self) -> float:
        """For how long they have scored so far, all together."""
        return self._crew.busy_seconds()


def unavailable_reason(rewards: RewardSet) -> str | None:
    """Why these functions are called in the run's own process, None where others can."""
    for name, source, function in zip(
        rewards.names, rewards.sources, rewards.functions, strict=True
    ):
        ours = source is not None and type(function).__module__.startswith("rloo.")
        if not (ours or inspect.isroutine(getattr(function, "func", function))):
            return f"the reward {name!r} is an object, whose state stays in this process"
        if source is not None:
            continue
        try:
            size = len(written(function))
        except Exception as error:  # whatever its objects raise
            return f"the reward function {name!r} cannot be sent to another process: {show(error)}"
        if size > MOST_BYTES:
            return (
                f"the reward function {name!r} takes {size:,} bytes with what it refers to, more "
                f"than the {MOST_BYTES:,} that are sent to another process"
            )
    return None


def _parts(rewards: RewardSet) -> list[Any]:
    both = zip(rewards.sources, rewards.functions, strict=True)
    return [function if source is None else source for source, function in both]


def written(value: Any) -> bytes:
    """A value as the processes read it."""
    buffer = io.BytesIO()
    # By what it refers to alone: a script's globals may be a model.
    dill.dump(value, buffer, recurse=True)
    return buffer.getvalue()


def _of_json(answer: bytes) -> RawScores:
    count, by_function, logs = json.loads(answer)
    return RawScores(
        count, by_function, {name: RewardLog(*values) for name, values in logs.items()}
    )


# -- in the process --------------------------------------------------------------------------------


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """What answers the calls of `RewardWorkerPool`."""
    parts, names, timeout, on_error = dill.loads(setup)
    functions = [load_reward(part) for part in parts]
    rewards = RewardSet(functions, names=names, timeout=timeout, on_error=on_error)

    known: dict[bytes, Any] = {}

    def answer(message: bytes) -> bytes:
        if not message:
            return b""
        seed, arguments, state = dill.loads(message)
        if state not in known:  # one for all groups of a rollout
            known.clear()
            known[state] = dill.loads(state) if state else None
        _seed(seed)
        given: tuple[Any, ...] = (*arguments, known[state])
        raw = rewards.call(*given)
        logs = {name: (log.extras, log.metrics) for name, log in raw.logs.items()}
        return json.dumps((raw.count, raw.by_function, logs), default=_plain).encode()

    return answer


def _seed(seed: int) -> None:
    """Seed the global generators that functions may draw from."""
    random.seed(seed)
    for module, name in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], name)(seed % 2**32)


def _plain(value: Any) -> Any:
    for method in ("item", "tolist"):
        if hasattr(value, method):
            try:
                return getattr(value, method)()
            except Exception:  # `item` of several, and whatever else it may be
                continue
    return show(value)
