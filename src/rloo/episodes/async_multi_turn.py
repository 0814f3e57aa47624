"""Episodes in the background: `submit` of an engine whose completions are episodes.

An episode continues as soon as the inner engine has sampled its turn: a thread calls the tools of
the turn, and submits the next turn. An episode does not wait for other episodes. The noise key of
the group, the prompt, the index of the completion and the position determine each draw, so the
order in which episodes continue changes no draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from rloo.engines.async_engine import AsyncEngine
from rloo.engines.sampling import sample_indices
from rloo.episodes.environments import EnvironmentPool
from rloo.episodes.multi_turn_engine import (
    EpisodeInProgress,
    EpisodeLimits,
    EpisodeSetup,
    MultiTurnEngine,
    check_prompts,
)
from rloo.types import Completion, NumSamples, Prompt, Sampling


@dataclass(slots=True)
class _PlayedGroup:
    """The episodes of a prompt. `resources` returns their environments to the pool. `playing` is
    the number of episodes that are not over, and 1 more while the group starts."""

    prompt: Prompt
    numbers: range
    sampling: Sampling
    noise: int
    period: object
    future: Future[list[Completion]] = field(default_factory=Future)
    resources: ExitStack = field(default_factory=ExitStack)
    episodes: list[EpisodeInProgress] = field(default_factory=list)
    playing: int = 1
    failed: bool = False
    released: bool = False


class AsyncMultiTurnEngine(MultiTurnEngine):
    """A `MultiTurnEngine` that also plays episodes in the background. Tools and environments run in
    threads of the main process. `inner` is an `AsyncEngine`. The environments of a submitted group
    stay in use until `release`, since reward functions may call them."""

    def __init__(
        self,
        inner: AsyncEngine,
        casts: Mapping[str | None, EpisodeSetup],
        limits: EpisodeLimits,
        stage: EnvironmentPool | None = None,
    ) -> None:
        super().__init__(inner, casts, limits, stage)
        self._background = inner
        self._lock = threading.Lock()
        self._period = object()  # replaced by `cancel_pending`
        self._groups: dict[Future[list[Completion]], _PlayedGroup] = {}

    def submit(
        self, prompts: Sequence[Prompt], samples: NumSamples, sampling: Sampling, noise: int
    ) -> list[Future[list[Completion]]]:
        """See `rloo.engines.async_engine.AsyncEngine`."""
        check_prompts(prompts)
        groups = [
            _PlayedGroup(prompt, own, sampling, noise, self._period)
            for prompt, own in zip(prompts, sample_indices(samples, prompts), strict=True)
        ]
        for group in groups:
            group.future.set_running_or_notify_cancel()
            with self._lock:
                self._groups[group.future] = group
            _in_thread(partial(self._start, group))
        return [group.future for group in groups]

    def cancel_pending(self) -> None:
        """Cancel all submitted groups. Their environments return to the pool once the tools that
        run have ended."""
        self._period = object()
        self._background.cancel_pending()
        with self._lock:
            pending = list(self._groups)
        self.release(pending)

    def release(self, groups: Sequence[Future[list[Completion]]]) -> None:
        """See `rloo.engines.async_engine.HoldsEnvironments`."""
        for future in groups:
            with self._lock:
                group = self._groups.pop(future, None)
                if group is None:
                    continue
                group.released = True
                over = group.playing == 0
            if over:
                group.resources.close()

    def busy_seconds(self) -> float:
        """The seconds in which the inner engine sampled."""
        return self._background.busy_seconds()

    def _start(self, group: _PlayedGroup) -> None:
        try:
            counts = [len(group.numbers)]
            context = self._with_environments([group.prompt], counts, group.noise)
            (leases,) = group.resources.enter_context(context)
            most = group.sampling.max_tokens
            group.episodes = self._begin(group.prompt, group.numbers, leases, most)
            going = [episode for episode in group.episodes if episode.failed is None]
            group.playing += len(going)
            self._sample_turns(group, going)
        except BaseException as error:  # raised where the result is awaited
            group.playing = 1  # no turn has begun
            self._end(group, error)
        else:
            self._end(group)

    def _sample_turns(self, group: _PlayedGroup, going: Sequence[EpisodeInProgress]) -> None:
        if not going:
            return
        if group.period is not self._period:
            raise RuntimeError("it was given up")
        rows = [episode.row() for episode in going]
        own = [range(episode.number, episode.number + 1) for episode in going]
        turns = self._background.submit(rows, own, group.sampling, group.noise)
        for episode, turn in zip(going, turns, strict=True):
            turn.add_done_callback(partial(self._continue_in_thread, group, episode))

    def _continue_in_thread(
        self, group: _PlayedGroup, episode: EpisodeInProgress, turn: Future[list[Completion]]
    ) -> None:
        # The engine's thread, which calls this method, must not wait for tools.
        _in_thread(partial(self._continue, group, episode, turn))

    def _continue(
        self, group: _PlayedGroup, episode: EpisodeInProgress, turn: Future[list[Completion]]
    ) -> None:
        try:
            going = [*self._answered([episode], turn.result(), group.sampling.max_tokens)]
            self._sample_turns(group, going)
        except BaseException as error:  # raised where the result is awaited
            self._end(group, error)
        else:
            if not going:
                self._end(group)

    def _end(self, group: _PlayedGroup, error: BaseException | None = None) -> None:
        """Record that an episode, or the start of the group, is over. After the last one, set the
        group's result. After the first error, set the exception."""
        with self._lock:
            group.playing -= 1
            last, first_error = group.playing == 0, error is not None and not group.failed
            group.failed |= error is not None
        if first_error:
            group.future.set_exception(error)
        elif last and not group.failed:
            group.future.set_result([episode.completion() for episode in group.episodes])
        with self._lock:
            unused = last and (group.released or group.failed)
        if unused:
            group.resources.close()


def _in_thread(do: Callable[[], None]) -> None:
    """Call a function in a daemon thread, which does not delay the end of the process."""
    threading.Thread(target=do, daemon=True).start()
