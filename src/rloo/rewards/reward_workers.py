"""Worker processes that call reward functions, while the main process samples further groups.

Each function is sent once: as a spec, which the worker loads, or as a function pickled by dill. The
workers return only JSON.
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

from rloo.distributed.remote_pool import Registry, make_pool
from rloo.distributed.standard_streams import IS, counted
from rloo.distributed.worker_pool import Calls, call_once
from rloo.distributed.worker_process import WorkerDied
from rloo.rewards.registry import load_reward
from rloo.rewards.reward_function import RewardLog
from rloo.rewards.reward_set import RawScores, RewardSet
from rloo.rewards.state_guard import describe_timeout, show
from rloo.rewards.timeout import GRACE_SECONDS
from rloo.types import Text

# The largest pickle of a function. A larger pickle contains a model or a dataset.
MOST_BYTES = 2**26
START_SECONDS = 120.0
# Seconds until a remote worker must have connected; its machine may still be booting.
COME_SECONDS = 1800.0
# The exit status when faulthandler ends a process whose function ignores its deadline.
_LATE = 1


class RewardWorkerPool:
    """`size` worker processes that score groups in parallel. Each process calls all functions, and
    has a separate copy of the state of their modules. `close` ends the processes."""

    def __init__(self, rewards: RewardSet, size: int, hub: Registry | None = None) -> None:
        """Start the workers on this machine. With `hub`, wait instead for workers that connect to
        it. Raises ValueError if `unavailable_reason` returns a reason."""
        if (reason := unavailable_reason(rewards)) is not None:
            raise ValueError(reason)
        setup = written((_parts(rewards), rewards.names, rewards.timeout, rewards.on_error))
        self._crew = make_pool("score", size, setup, hub, COME_SECONDS)
        self._names, self._timeout = rewards.names, rewards.timeout
        self._missing = rewards.on_error == "missing"
        for _ in range(size):  # they start while the first group is sampled
            self._crew.submit(partial(call_once, b"", START_SECONDS))
        self.close: Callable[[], object] = self._crew.close

    def submit(
        self, seed: int, make: Callable[[], Sequence[Any]], state: bytes = b""
    ) -> Future[tuple[list[Text], RawScores]]:
        """Score the completions that `make` returns. `make` returns them as the arguments of
        `RewardSet.call`, without the trainer's state. `state` is the trainer's state, pickled by
        the function `written`. `seed` seeds the global random generators. Returns a future of the
        completions' texts and raw scores."""

        def job(_: object) -> Calls[tuple[list[Text], RawScores]]:
            arguments = tuple(make())  # in the pool's thread, since `make` takes time
            message = written((seed, arguments, state))
            return arguments[1], (yield from self._score(message, len(arguments[1])))

        return self._crew.submit(job)

    def _score(self, message: bytes, count: int) -> Calls[RawScores]:
        began, seconds = time.monotonic(), None
        if self._timeout:
            seconds = START_SECONDS + len(self._names) * (self._timeout + 2 * GRACE_SECONDS)
        try:
            return _of_json((yield message, seconds))
        except WorkerDied as lost:
            late = self._timeout and time.monotonic() - began >= self._timeout
            if not late or lost.status not in (None, _LATE):
                raise  # the pool retries it
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
        """Cancel pending jobs."""
        self._crew.cancel_pending()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._crew.size

    @property
    def lost(self) -> int:
        """The number of processes lost so far."""
        return self._crew.lost

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return self._crew.pids

    def busy_seconds(self) -> float:
        """Return the seconds spent scoring so far, summed over processes."""
        return self._crew.busy_seconds()


def unavailable_reason(rewards: RewardSet) -> str | None:
    """Return the reason why workers cannot call these functions; None if they can."""
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
        except Exception as error:  # objects may raise anything
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
    """Pickle a value for the workers."""
    buffer = io.BytesIO()
    # Pickle only the globals that the function uses: other globals of a script may include a model.
    dill.dump(value, buffer, recurse=True)
    return buffer.getvalue()


def _of_json(answer: bytes) -> RawScores:
    count, by_function, logs = json.loads(answer)
    return RawScores(
        count, by_function, {name: RewardLog(*values) for name, values in logs.items()}
    )


# -- in the process --------------------------------------------------------------------------------


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the worker's function that answers the calls of `RewardWorkerPool`."""
    parts, names, timeout, on_error = dill.loads(setup)
    functions = [load_reward(part) for part in parts]
    rewards = RewardSet(functions, names=names, timeout=timeout, on_error=on_error)

    known: dict[bytes, Any] = {}

    def answer(message: bytes) -> bytes:
        if not message:
            return b""
        seed, arguments, state = dill.loads(message)
        if state not in known:  # all groups of a rollout have the same state
            known.clear()
            known[state] = dill.loads(state) if state else None
        _seed(seed)
        given: tuple[Any, ...] = (*arguments, known[state])
        raw = rewards.call(*given)
        logs = {name: (log.extras, log.metrics) for name, log in raw.logs.items()}
        return json.dumps((raw.count, raw.by_function, logs), default=_plain).encode()

    return answer


def _seed(seed: int) -> None:
    """Seed the global generators that functions may use."""
    random.seed(seed)
    for module, name in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if module in sys.modules:
            getattr(sys.modules[module], name)(seed % 2**32)


def _plain(value: Any) -> Any:
    for method in ("item", "tolist"):
        if hasattr(value, method):
            try:
                return getattr(value, method)()
            except Exception:  # `item` of several values, or another error
                continue
    return show(value)
