"""Asynchronous rollouts: sampling and scoring run ahead while the model trains.

Groups are numbered in the order in which their prompts are taken from the dataset. Group n starts
when n < (max_staleness + version + 1) x groups per rollout. `version` is the number of rollouts
trained so far (AReaL's gate, arXiv 2505.24298, equation 3). Groups are trained on in the order of
their numbers, and no group is dropped because it is old. To train on groups in the order in which
they finish would favour short completions. A checkpoint stores the number of trained rollouts.
Pending rollouts are sampled again on resume.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from rloo.algorithm.rank_rollout import RankRollout, RewardScorer, all_gather_completions
from rloo.algorithm.reward_scoring import Called, column_names, submit_group
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.distributed.platform_info import num_processors
from rloo.distributed.worker_pool import chain_future, wait_result
from rloo.engines.async_engine import AsyncEngine, HoldsEnvironments
from rloo.engines.counter_rng import noise_key
from rloo.rewards.reward_workers import RewardWorkerPool, unavailable_reason, written
from rloo.types import Completion, Group, Prompt


@dataclass(slots=True)
class _PendingRollout:
    """A rollout in flight: the number of its first group, its noise key and the dataset position
    after its prompts. On the main process it also has the futures of each group."""

    number: int
    prompts: list[Prompt]
    noise: int
    position: dict[str, Any]
    epoch: float
    sampled: list[Future[list[Completion]]] = field(default_factory=list)
    scored: list[Future[Called]] = field(default_factory=list)

    @property
    def num_done(self) -> int:
        """The number of groups that are ready for training."""
        return sum(future.done() for future in self.scored or self.sampled)


@dataclass(slots=True)
class AsyncRolloutGenerator(RankRollout):
    """Generates rollouts with an engine in another process. The engine's weights are at most
    `max_staleness` rollouts older than the weights that are trained. Reward functions run in worker
    processes, the `scorers` of the main process. If worker processes cannot call the functions,
    `why_here` is the reason. Then this process scores each rollout, just before training on it."""

    why_here: str | None = None
    scorers: RewardWorkerPool | None = None
    _pending: deque[_PendingRollout] = field(default_factory=deque)
    _trained: int = 0
    _after: dict[str, Any] = field(default_factory=dict)
    _epoch: float = 0.0
    _decoder: Any = None
    # Weight version -> number of rollouts trained before it, for the versions of pending groups.
    _rollouts_trained_at_version: dict[int, int] = field(default_factory=dict)
    _async_metrics: dict[str, float] = field(default_factory=dict)
    _pace: _Timings | None = None
    # Seconds spent sampling since the last rollout.
    _sampling: float = 0.0

    def __post_init__(self) -> None:
        self._after, self._epoch = self.prompts.state_dict(), self.prompts.epoch
        if self.engine.capabilities.whole_groups:
            self.why_here = "it has the data of the episodes"
        else:
            self.why_here = unavailable_reason(self.rewards)
        if self.why_here is None and self.world.is_main:
            some = self.config.async_options.reward_workers or min(
                self.batches.prompts_per_rollout, num_processors(), 8
            )
            placed = self.config.async_options.remote_workers in ("score", "both")
            hub = self.world.worker_registry if placed else None
            self.scorers = RewardWorkerPool(self.rewards, some, hub)
            # Threads of the scorers decode with this copy while the main thread uses the tokenizer.
            self._decoder = copy.deepcopy(self.tokenizer)

    @property
    def epoch(self) -> float:
        """The number of passes over the dataset, counting only rollouts that were trained on."""
        return self._epoch

    def describe(self) -> dict[str, Any]:
        """Return the facts of `SyncRolloutGenerator.describe`, with `max_staleness` and the
        processes that compute rewards."""
        told = SyncRolloutGenerator.describe(self) | {"max_staleness": self.config.max_staleness}
        if self.scorers is not None:
            return told | {"rewards_in": f"{self.scorers.size} processes"}
        return told | {"rewards_in": f"this process, since {self.why_here}"}

    def close(self) -> None:
        """Cancel pending rollouts, return their prompts to the dataset, and end the reward
        workers."""
        self._pending.clear()
        self._beside.cancel_pending()
        if self.scorers is not None:
            self.scorers.close()
        self.prompts.load_state_dict(self._after)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset position after the last returned rollout, and the state of the reward
        functions. Pending rollouts are not included."""
        return {"prompts": self._after, "rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restore what `state_dict` returned, and cancel pending rollouts."""
        self._pending.clear()
        self._beside.cancel_pending()
        if self.scorers is not None:
            self.scorers.cancel_pending()
        self.prompts.load_state_dict(state["prompts"])
        self.rewards.load_state_dict(state["rewards"])
        self._after, self._epoch = state["prompts"], self.prompts.epoch
        self.step, self._pace = step, None

    @property
    def _beside(self) -> AsyncEngine:
        return cast(AsyncEngine, self.engine)

    def _collect(self, num_prompts: int) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of the next rollout, once all of them are done."""
        self._rollouts_trained_at_version[self.engine.version] = self._trained
        self._begin(num_prompts)
        begun = self._pending[0]
        done = sum(other.num_done for other in self._pending)
        in_flight = sum(len(other.prompts) for other in self._pending) - done
        came = time.monotonic()
        with self.clock.phase("sample"):
            drawn = [wait_result(each) for each in begun.sampled]
            count = self.config.num_generations
            sampled = all_gather_completions(drawn, begun.prompts, count, self.world)
        with self.clock.phase("reward"):
            called = None if self.why_here else [wait_result(each) for each in begun.scored]
            waited = time.monotonic() - came
            judge = RewardScorer(
                self.rewards, self.tokenizer, self.world, self.trainer, begun.noise
            )
            groups, logged = judge.score(begun.prompts, sampled, called=called)
        if isinstance(self.engine, HoldsEnvironments):
            self.engine.release(begun.sampled)
        self._pending.popleft()
        self._after, self._epoch = begun.position, begun.epoch
        self.prompts.update(groups)
        if not self._pending:  # the next prompts may depend on these rewards
            self._after = self.prompts.state_dict()
        self._async_metrics = {
            "groups/first": float(begun.number),
            "queue/done": float(done),
            "queue/in_flight": float(in_flight),
            **self._staleness(begun.number, groups),
            **self._idle(waited),
        }
        self._trained += 1
        return groups, logged

    def _begin(self, num_prompts: int) -> None:
        """Submit the rollouts that `max_staleness` allows, up to the last step of the run."""
        per_rollout = self.batches.steps_per_rollout
        while len(self._pending) <= self.config.max_staleness:
            step = self.step + len(self._pending) * per_rollout
            if self._pending and step >= self.trainer.max_steps:
                return
            prompts = self.prompts.next(num_prompts)
            begun = _PendingRollout(
                step // per_rollout * num_prompts,
                prompts,
                noise_key(self.config.seed, "train", step),
                self.prompts.state_dict(),
                self.prompts.epoch,
            )
            self._pending.append(begun)
            if self.world.is_main:
                count = self.config.num_generations
                begun.sampled = self._beside.submit(prompts, count, self.sampling, begun.noise)
                if self.scorers is not None:
                    self._score_when_sampled(begun, self.scorers)

    def _score_when_sampled(self, begun: _PendingRollout, scorers: RewardWorkerPool) -> None:
        names, state = column_names(begun.prompts), b""
        if self.rewards.reads_state:
            # A copy of the state's values: its class would import torch, and the state may change.
            known = {**vars(self.trainer), "log_history": [*self.trainer.log_history]}
            state = written(SimpleNamespace(**known))
        for index, (prompt, sampled) in enumerate(zip(begun.prompts, begun.sampled, strict=True)):
            scored: Future[Called] = Future()
            scored.set_running_or_notify_cancel()
            begun.scored.append(scored)
            seed = noise_key(begun.noise, "reward", begun.number + index)

            def begin(
                seed: int = seed, prompt: Prompt = prompt, sampled: Any = sampled
            ) -> Future[Called]:
                submit = partial(scorers.submit, seed, state=state)
                group = prompt, sampled.result()
                return submit_group(group, names, self.rewards.names, self._decoder, submit)

            sampled.add_done_callback(partial(_then, begin, scored))

    def _staleness(self, first: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of staleness. The staleness of a token is the number of rollouts by
        which the weights that sampled the token are older than the weights that train on it. Raises
        RuntimeError if the staleness exceeds max_staleness."""
        tokens: Counter[int] = Counter()
        for number, group in enumerate(groups, start=first):
            for version, count in (span for c in group.completions for span in c.weight_versions):
                age = self._trained - self._trained_on(version)
                if not 0 <= age <= self.config.max_staleness:
                    raise RuntimeError(
                        f"group {number} was sampled by version {version} of the weights, and at "
                        f"most {self.config.max_staleness} rollouts may lie between (max_staleness)"
                    )
                tokens[age] += count
        oldest = self._trained - self.config.max_staleness
        self._rollouts_trained_at_version = {
            v: n for v, n in self._rollouts_trained_at_version.items() if n >= oldest
        }
        total = sum(age * count for age, count in tokens.items())
        return {
            "staleness/mean": total / max(tokens.total(), 1),
            "staleness/max": float(max(tokens, default=0)),
        }

    def _trained_on(self, version: int) -> int:
        """Return the number of rollouts (or a lower bound) that the weights of `version` were
        trained on. A version that an evaluation loaded counts as the last known version before it.
        A version older than all known versions counts as too old. A version newer than the engine's
        counts as too new."""
        never = self.config.max_staleness + 1
        if version > self.engine.version:
            return self._trained + 1
        return max(
            (n for v, n in self._rollouts_trained_at_version.items() if v <= version),
            default=-never,
        )

    def _idle(self, waited: float) -> dict[str, float]:
        """Return the share of the time since the last rollout in which each role was idle."""
        scorers = self.scorers
        scored = scorers.busy_seconds() / scorers.size if scorers is not None else 0.0
        before, now = self._pace, _Timings(time.monotonic(), self._beside.busy_seconds(), scored)
        self._pace, self._sampling = now, now.sampled - (before.sampled if before else 0.0)
        if before is None:
            return {}
        seconds = now.clock - before.clock
        idle = {
            "idle/trainer": waited / seconds,
            "idle/sampler": 1.0 - (now.sampled - before.sampled) / seconds,
        }
        if scorers is not None:
            idle["idle/rewards"] = 1.0 - (now.scored - before.scored) / seconds
        return idle

    def _seconds(self) -> float:
        return self._sampling

    def _stats(self) -> dict[str, float]:
        lost = {"scorers/lost": float(self.scorers.lost)} if self.scorers is not None else {}
        return self.engine.stats() | self._async_metrics | lost


class _Timings(NamedTuple):
    """The time at which a rollout was returned, and the seconds of sampling and scoring until
    then."""

    clock: float
    sampled: float
    scored: float


def _then(
    begin: Callable[[], Future[Called]], scored: Future[Called], sampled: Future[list[Completion]]
) -> None:
    """Submit a sampled group for scoring, and copy the result or the exception to `scored`."""
    try:
        sampled.result()
        begun = begin()
    except BaseException as error:  # raised where the result is awaited
        scored.set_exception(error)
        return
    chain_future(scored, begun, lambda called: called)


def make_rollouts(config: RLOOConfig, world: World, *parts: Any) -> SyncRolloutGenerator:
    """Return the rollout generator that the options select. `parts` are the fields of
    `SyncRolloutGenerator` after `config`, in order. The generator is asynchronous if other
    processes sample (`config.samples_beside`)."""
    if config.samples_beside:
        return AsyncRolloutGenerator(config, *parts, world=world)
    if world.collectives is None:
        return SyncRolloutGenerator(config, *parts)
    return RankRollout(config, *parts, world=world)
