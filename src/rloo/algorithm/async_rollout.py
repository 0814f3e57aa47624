"""Asynchronous rollouts: sampling and scoring run ahead while the model trains.

Groups are numbered in the order in which their prompts are taken from the dataset. Group n starts
when n < (max_staleness + version + 1) x groups per rollout. `version` is the number of rollouts
trained so far (AReaL's gate, arXiv 2505.24298, equation 3). If a generation batch is divided into
rollouts of one optimizer step (`BatchSizes.in_steps`), `max_staleness` x `rollouts_per_version`
rollouts may be ahead, and the age of weights is counted in generation batches. Groups are trained
on in the order of their numbers, and no group is dropped because it is old. To train on groups in
the order in which they finish would favour short completions. A checkpoint stores the dataset
position after the last trained rollout. Pending groups are sampled again on resume.

With `dynamic_sample`, the groups that replace groups with equal rewards are the next groups by
number. The rewards of lower-numbered groups therefore determine the rollout of a group; the order
in which groups finish does not. Group n starts when the bound allows it if no unfinished group had
equal rewards (`allowed_groups`). Such a group can only move group n to an earlier rollout.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from rloo.algorithm.async_schedule import allowed_groups
from rloo.algorithm.rank_rollout import RankRollout, RewardScorer, all_gather_completions
from rloo.algorithm.reward_scoring import Called, column_names, make_groups, submit_group
from rloo.algorithm.reward_shaping import has_reward_variance
from rloo.algorithm.rollout import SyncRolloutGenerator
from rloo.config.config import RLOOConfig
from rloo.distributed import World
from rloo.distributed.platform_info import num_processors
from rloo.distributed.worker_pool import chain_future, wait_result
from rloo.engines.async_engine import AsyncEngine, HoldsEnvironments
from rloo.engines.counter_rng import noise_key
from rloo.engines.sampling import requested_samples
from rloo.rewards.reward_workers import RewardWorkerPool, unavailable_reason, written
from rloo.types import Completion, Group, Prompt, Rollout

# The name of the number of the next group in a saved position.
NEXT_GROUP = "next_group"


@dataclass(slots=True)
class _PendingGroup:
    """A group in flight, with its number and its noise key. `position` and `epoch` are those of the
    dataset after its prompt; `position` is None inside a rollout without `dynamic_sample`. On the
    main process it also has the futures. `is_flat`: whether its rewards are equal, if known."""

    number: int
    prompt: Prompt
    noise: int
    position: dict[str, Any] | None
    epoch: float
    sampled: Future[list[Completion]] | None = None
    scored: Future[Called] | None = None
    is_flat: bool | None = None

    @property
    def is_done(self) -> bool:
        """Whether the group is ready for training."""
        future = self.scored or self.sampled
        return future is not None and future.done()


@dataclass(slots=True)
class AsyncRolloutGenerator(RankRollout):
    """Generates rollouts with an engine in another process. The engine's weights are at most
    `max_staleness` generation batches older than those that are trained. Reward functions run in
    worker processes, the `scorers` of the main process. If worker processes cannot call them,
    `why_here` is the reason. Then this process scores each rollout, just before training on it."""

    why_here: str | None = None
    scorers: RewardWorkerPool | None = None
    _pending: deque[_PendingGroup] = field(default_factory=deque)
    _trained: int = 0
    # The number of the next group to begin.
    _next_number: int = 0
    # In the rollout that is collected: the groups so far, and the refills that are left.
    _collected: list[tuple[int, Group]] = field(default_factory=list)
    _refills: int = 0
    _waited: float = 0.0
    _after: dict[str, Any] = field(default_factory=dict)
    _epoch: float = 0.0
    _decoder: Any = None
    # Weight version -> number of rollouts trained before it, for the versions of pending groups.
    _rollouts_trained_at_version: dict[int, int] = field(default_factory=dict)
    _async_metrics: dict[str, float] = field(default_factory=dict)
    # The timings at the end of the last rollout, and now.
    _pace: _Timings | None = None
    _now: _Timings | None = None
    # Seconds spent sampling since the last rollout.
    _sampling: float = 0.0

    def __post_init__(self) -> None:
        self._after, self._epoch = self._position(), self.prompts.epoch
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
        """The number of passes over the dataset, counting only trained rollouts."""
        return self._epoch

    @property
    def needs_weights(self) -> bool:
        """See `RolloutGenerator`."""
        return self._trained % self.batches.rollouts_per_version == 0

    def describe(self) -> dict[str, Any]:
        """Add `max_staleness` and the processes that compute rewards."""
        told = SyncRolloutGenerator.describe(self) | {"max_staleness": self.config.max_staleness}
        if self.scorers is not None:
            return told | {"rewards_in": f"{self.scorers.size} processes"}
        return told | {"rewards_in": f"this process, since {self.why_here}"}

    def close(self) -> None:
        """Cancel pending groups, return their prompts to the dataset, and end the reward
        workers."""
        self._pending.clear()
        self._beside.cancel_pending()
        if self.scorers is not None:
            self.scorers.close()
        self.prompts.load_state_dict(self._after)

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset position after the last returned rollout, and the state of the reward
        functions. Pending groups are not included."""
        return {"prompts": self._after, "rewards": self.rewards.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, step: int) -> None:
        """Restore what `state_dict` returned, and cancel pending groups."""
        self._pending.clear()
        self._beside.cancel_pending()
        if self.scorers is not None:
            self.scorers.cancel_pending()
        self.prompts.load_state_dict(state["prompts"])
        self.rewards.load_state_dict(state["rewards"])
        self._after, self._epoch = state["prompts"], self.prompts.epoch
        self.step: int = step
        self._pace = None
        # Without dynamic_sample the number follows from the step.
        rollouts = step // self.batches.steps_per_rollout
        self._next_number = state["prompts"].get(
            NEXT_GROUP, rollouts * self.batches.prompts_per_rollout
        )

    @property
    def _beside(self) -> AsyncEngine:
        return cast(AsyncEngine, self.engine)

    def _position(self) -> dict[str, Any]:
        """The dataset position, with the number of the next group if the position does not
        determine it."""
        number = {NEXT_GROUP: self._next_number} if self.config.dynamic_sample else {}
        return self.prompts.state_dict() | number

    def next(self) -> Rollout:
        """See `SyncRolloutGenerator.next`. Blocks until the rollout's groups are done."""
        if self.needs_weights:  # the engine has just got them
            self._rollouts_trained_at_version[self.engine.version] = self._trained
        self._start_rollout()
        rollout = SyncRolloutGenerator.next(self)
        self._start_rollout()
        self._trained, self._pace = self._trained + 1, self._now
        return rollout

    def _start_rollout(self) -> None:
        self._collected, self._waited, self._refills = [], 0.0, self._most_refills

    @property
    def _most_refills(self) -> int:
        """How often the groups of a rollout are refilled."""
        return self.config.prompt_options.max_resample_times if self.config.dynamic_sample else 0

    def _collect(self, num_prompts: int) -> tuple[list[Group], dict[str, float]]:
        """Return the next groups by number, once all of them are done."""
        self._begin(num_prompts)
        if not self._collected:
            done = sum(other.is_done for other in self._pending)
            self._async_metrics = {
                "groups/first": float(self._pending[0].number),
                "queue/done": float(done),
                "queue/in_flight": float(len(self._pending) - done),
            }
        chunk = [self._pending.popleft() for _ in range(num_prompts)]
        prompts, noise = [each.prompt for each in chunk], chunk[0].noise
        came = time.monotonic()
        with self.clock.phase("sample"):
            drawn = [wait_result(each.sampled) for each in chunk if each.sampled is not None]
            samples = requested_samples(prompts, self.config.num_generations)
            sampled = all_gather_completions(drawn, prompts, samples, self.world)
        with self.clock.phase("reward"):
            called = None
            if self.why_here is None:
                called = [wait_result(each.scored) for each in chunk if each.scored is not None]
            self._waited += time.monotonic() - came
            judge = RewardScorer(self.rewards, self.tokenizer, self.world, self.trainer, noise)
            groups, logged = judge.score(prompts, sampled, called=called)
        if isinstance(self.engine, HoldsEnvironments):
            self.engine.release([each.sampled for each in chunk if each.sampled is not None])
        assert chunk[-1].position is not None
        self._after, self._epoch = chunk[-1].position, chunk[-1].epoch
        self.prompts.update(groups)
        # The next prompts may depend on these rewards: the sampler of `variance` has the position
        # after the last rollout with rewards, also while later rollouts are pending.
        if not self._pending or self.config.prompt_sampling == "variance":
            self._after = self._position()
        self._collected += [(c.number, group) for c, group in zip(chunk, groups, strict=True)]
        self._refills -= 1
        self._async_metrics |= {**self._staleness(self._collected), **self._idle(self._waited)}
        return groups, logged

    def _begin(self, missing: int) -> None:
        """Submit the groups that `max_staleness` allows, up to the last step of the run. The
        current rollout still needs `missing` groups."""
        per_rollout = self.batches.steps_per_rollout
        wanted, dynamic = self.batches.prompts_per_rollout, self.config.dynamic_sample
        steps_after = self.trainer.max_steps - self.step - per_rollout
        more = self.config.max_staleness * self.batches.rollouts_per_version
        more = max(0, min(more, -(-steps_after // per_rollout)))
        flat = self._known_flat() if dynamic else []
        total = allowed_groups(flat, missing, self._refills, wanted, self._most_refills, more)
        if dynamic:  # only the main process knows which groups are done
            total = self.world.broadcast_object(total)
        begun: list[_PendingGroup] = []
        while len(self._pending) + len(begun) < total:
            number = self._next_number
            prompts = self.prompts.next(1 if dynamic else wanted)
            self._next_number += len(prompts)
            noise = noise_key(self.config.seed, "train", number // wanted * per_rollout)
            places: list[Any] = [None] * (len(prompts) - 1) + [self._position()]
            begun += [
                _PendingGroup(number + n, prompt, noise, place, self.prompts.epoch)
                for n, (prompt, place) in enumerate(zip(prompts, places, strict=True))
            ]
        self._pending += begun
        if self.world.is_main:
            for noise, some in groupby(begun, key=lambda group: group.noise):
                self._submit(noise, list(some))

    def _submit(self, noise: int, begun: Sequence[_PendingGroup]) -> None:
        prompts = [group.prompt for group in begun]
        samples = requested_samples(prompts, self.config.num_generations)
        futures = self._beside.submit(prompts, samples, self.sampling, noise)
        for group, future in zip(begun, futures, strict=True):
            group.sampled = future
        if self.scorers is not None:
            self._score_when_sampled(begun, self.scorers)

    def _known_flat(self) -> list[bool]:
        """Whether each pending group is known to have equal rewards."""
        for group in self._pending:
            if group.scored is None or not group.scored.done() or group.is_flat is not None:
                continue
            if group.scored.exception() is None and group.sampled is not None:
                completions, (texts, raw) = group.sampled.result(), group.scored.result()
                scores = self.rewards.combine([raw], learn=False)
                (made,) = make_groups([group.prompt], [completions], texts, scores)
                group.is_flat = not has_reward_variance(made, self.config)
        return [group.is_flat is True for group in self._pending]

    def _score_when_sampled(
        self, begun: Sequence[_PendingGroup], scorers: RewardWorkerPool
    ) -> None:
        names, state = column_names([group.prompt for group in begun]), b""
        if self.rewards.reads_state:
            # A copy of the state's values: its class would import torch, and the state may change.
            known = {**vars(self.trainer), "log_history": [*self.trainer.log_history]}
            state = written(SimpleNamespace(**known))
        for group in begun:
            scored: Future[Called] = Future()
            scored.set_running_or_notify_cancel()
            group.scored = scored
            submit = partial(
                scorers.submit, noise_key(group.noise, "reward", group.number), state=state
            )
            begin = partial(self._submit_score, group.prompt, names, submit)
            assert group.sampled is not None
            group.sampled.add_done_callback(partial(_then, begin, scored))

    def _submit_score(
        self, prompt: Prompt, names: list[str], submit: Any, completions: list[Completion]
    ) -> Future[Called]:
        """Submit a sampled group for scoring."""
        return submit_group((prompt, completions), names, self.rewards.names, self._decoder, submit)

    def _staleness(self, groups: Sequence[tuple[int, Group]]) -> dict[str, float]:
        """Return the metrics of staleness. The staleness of a token is the number of generation
        batches by which the weights that sampled the token are older than the weights that train on
        it. `groups` have their numbers. Raises RuntimeError if the staleness exceeds max_staleness.
        """
        tokens: Counter[int] = Counter()
        now = self._trained // (size := self.batches.rollouts_per_version)
        for number, group in groups:
            for version, count in (span for c in group.completions for span in c.weight_versions):
                age = now - self._trained_on(version) // size
                if not 0 <= age <= self.config.max_staleness:
                    raise RuntimeError(
                        f"group {number} was sampled by version {version} of the weights, and at "
                        f"most {self.config.max_staleness} updates may lie between (max_staleness)"
                    )
                tokens[age] += count
        oldest = (now - self.config.max_staleness) * size
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
        size = self.batches.rollouts_per_version
        if version > self.engine.version:
            return self._trained + size
        return max(
            (n for v, n in self._rollouts_trained_at_version.items() if v <= version),
            default=-(self.config.max_staleness + 1) * size,
        )

    def _idle(self, waited: float) -> dict[str, float]:
        """Return the share of the time since the last rollout in which each role was idle."""
        scorers = self.scorers
        scored = scorers.busy_seconds() / scorers.size if scorers is not None else 0.0
        before, now = self._pace, _Timings(time.monotonic(), self._beside.busy_seconds(), scored)
        self._now, self._sampling = now, now.sampled - (before.sampled if before else 0.0)
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
        return SyncRolloutGenerator._stats(self) | self._async_metrics | lost


class _Timings(NamedTuple):
    """The time at which a rollout was returned, and the seconds of sampling and scoring until
    then."""

    clock: float
    sampled: float
    scored: float


def _then(
    begin: Callable[[list[Completion]], Future[Called]],
    scored: Future[Called],
    sampled: Future[list[Completion]],
) -> None:
    """Submit a sampled group for scoring, and copy the result or the exception to `scored`."""
    try:
        begun = begin(sampled.result())
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
