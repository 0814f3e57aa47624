"""Rollouts by a user's function in the background: `submit` of a `RolloutFuncEngine`.

The function is called once for each group, in a thread of the main process. Calls for different
groups run at the same time, so a group does not wait for another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rloo.distributed.worker_pool import wait_result
from rloo.engines.async_engine import AsyncEngine
from rloo.engines.sampling import sample_indices
from rloo.episodes.rollout_func import (
    FunctionCall,
    RolloutFuncEngine,
    current_call,
    require_one_prompt,
)
from rloo.types import Completion, NumSamples, Prompt, Sampling


class AsyncRolloutFuncEngine(RolloutFuncEngine):
    """A `RolloutFuncEngine` that also calls the function in the background. `turn`, `go_on` and
    `rows` belong to the call of their thread or, in an event loop, of their task."""

    def __init__(
        self,
        inner: AsyncEngine,
        function: Callable[[list[Any], Any], Mapping[str, Any]],
        trainer: Callable[[], Any],
        vocabulary: int,
    ) -> None:
        super().__init__(inner, function, trainer, vocabulary)
        self._background = inner
        self._period = object()  # replaced by `cancel_pending`

    def submit(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """See `rloo.engines.async_engine.AsyncEngine`."""
        sample = partial(self._sample_turns, self._period)
        futures: list[Future[list[Completion]]] = []
        for prompt, own in zip(prompts, sample_indices(samples, prompts), strict=True):
            rows = [(prompt, number) for number in own]
            call = FunctionCall(rows, sampling, noise, sample, self._background.version)
            future: Future[list[Completion]] = Future()
            future.set_running_or_notify_cancel()
            threading.Thread(target=self._play, args=(prompt, call, future), daemon=True).start()
            futures.append(future)
        return futures

    def cancel_pending(self) -> None:
        """Cancel all submitted groups. A function that runs gets a RuntimeError from its next
        turn."""
        self._period = object()
        self._background.cancel_pending()

    def busy_seconds(self) -> float:
        """The seconds in which the inner engine sampled."""
        return self._background.busy_seconds()

    def _call(self) -> FunctionCall | None:
        return current_call.get()

    def _play(self, prompt: Prompt, call: FunctionCall, future: Future[list[Completion]]) -> None:
        try:
            completions = self._completions(call)
            require_one_prompt(prompt, completions)
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(completions)

    def _sample_turns(
        self,
        period: object,
        prompts: Sequence[Prompt],
        samples: NumSamples,
        sampling: Sampling,
        noise: int,
    ) -> list[list[Completion]]:
        if period is not self._period:
            raise RuntimeError("it was given up")
        return [*map(wait_result, self._background.submit(prompts, samples, sampling, noise))]
