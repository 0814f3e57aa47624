"""Simulates a run as events: groups are sampled, scored and trained in order, and engines fail.

The simulation uses only the time of each part, and no properties of a GPU or a model. A rollout
starts by the rule of `rloo.algorithm.async_rollout`: at most `staleness` earlier rollouts are not
trained yet."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rloo.config.optional_packages import install

Events = Generator[Any, Any, None]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run of `rollouts` rollouts of `groups` groups. Each of `engines` engines runs `at_once`
    calls in parallel. A call samples `groups_a_call` groups, which end together (None: all groups
    of a rollout). `sample(generator, n)` draws the seconds of a call with n groups, `score` the
    seconds in which one of `reward_workers` scores a group, and `train` the seconds of training on
    a rollout. The trainer takes `publish` seconds to write a version of the weights. An engine
    takes `load` seconds to read the version before its next call. With `drains`, the trainer waits
    for active calls before it publishes. An engine fails after `between_failures` seconds on
    average, for `restart` seconds. `kills` maps a rollout to the seconds after its training at
    which the first engine fails for certain. `first` is the time in seconds before an engine's
    first call."""

    groups: int
    rollouts: int
    staleness: int
    sample: Callable[[random.Random, int], float]
    train: Callable[[random.Random], float]
    score: Callable[[random.Random], float] = lambda _: 0.0
    engines: int = 1
    at_once: int = 1
    groups_a_call: int | None = None
    reward_workers: int = 1
    publish: float = 0.0
    load: float = 0.0
    drains: bool = False
    between_failures: float = float("inf")
    restart: float = 0.0
    kills: Mapping[int, float] = field(default_factory=dict)
    first: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation: the seconds at which training on each rollout ended, the shares
    of the trainer's time and of the engines' capacity that are used, the number of repeated calls,
    and the largest number of groups in flight (started but not trained)."""

    ends: list[float]
    trainer_busy: float
    engines_busy: float
    repeated: int
    most_in_flight: int

    def seconds_a_rollout(self, warm_up: int = 1) -> float:
        """The mean seconds of a rollout after the first `warm_up`."""
        return (self.ends[-1] - self.ends[warm_up - 1]) / (len(self.ends) - warm_up)


def simulate(flow: SimulatedRun) -> SimulationResult:
    """The result of simulating a run. Raises ModuleNotFoundError without simpy."""
    try:
        import simpy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"simpy is not installed; the simulation of a run needs it: {install('plan')}",
            name="simpy",
        ) from error
    run = _Run(flow, simpy)
    # The simulation ends when all rollouts are trained; later failures do not matter.
    run.env.run(run.env.process(run.trainer()))
    total = run.ends[-1]
    places = flow.engines * flow.at_once
    return SimulationResult(
        run.ends, run.trained / total, run.sampled / total / places, run.repeated, run.most
    )


@dataclass(slots=True)
class _Engine:
    """An engine: its version, the processes that sample now, and the time of its next
    availability."""

    version: int = -1
    up: float = 0.0
    at_work: set[Any] = field(default_factory=set)


class _Run:
    def __init__(self, flow: SimulatedRun, simpy: Any) -> None:
        self.flow, self.simpy, self.env = flow, simpy, simpy.Environment()
        self.draw = random.Random(flow.seed)
        # Calls in the order of their numbers: a repeated call precedes calls that are not made yet.
        self.calls = simpy.PriorityStore(self.env)
        self.scorers = simpy.Resource(self.env, flow.reward_workers)
        self.engines = [_Engine(up=flow.first) for _ in range(flow.engines)]
        self.version, self.begun, self.numbered = -1, 0, 0
        self.scored: list[Any] = []
        self.open: Any = None
        self.ends: list[float] = []
        self.trained = self.sampled = 0.0
        self.repeated = self.most = 0
        for engine in self.engines:
            for _ in range(flow.at_once):
                self.env.process(self.place(engine))
            if flow.between_failures < float("inf"):
                self.env.process(self.failures(engine))

    def trainer(self) -> Events:
        flow, env = self.flow, self.env
        for number in range(flow.rollouts):
            if flow.drains:
                yield from self.drained()
            yield env.timeout(flow.publish)
            self.version = number
            if self.open is not None:
                self.open.succeed()
                self.open = None
            while self.begun < min(number + flow.staleness + 1, flow.rollouts):
                self.begin()
            self.most = max(self.most, (self.begun - number) * flow.groups)
            yield self.scored[number]
            seconds = flow.train(self.draw)
            yield env.timeout(seconds)
            self.trained += seconds
            self.ends.append(env.now)
            if number in flow.kills:
                env.process(self.kill(flow.kills[number]))

    def drained(self) -> Events:
        """Stop new calls and wait for the active ones."""
        self.open = self.env.event()
        while any(engine.at_work for engine in self.engines):
            yield self.simpy.AnyOf(self.env, [p for e in self.engines for p in e.at_work])

    def begin(self) -> None:
        """Start a rollout."""
        flow, left, groups = self.flow, self.flow.groups, []
        while left:
            size = min(flow.groups_a_call or flow.groups, left)
            done = self.env.event()
            self.calls.put(self.simpy.PriorityItem(self.numbered, (size, done)))
            self.numbered += 1
            groups += [self.env.process(self.scoring(done)) for _ in range(size)]
            left -= size
        self.scored.append(self.simpy.AllOf(self.env, groups))
        self.begun += 1

    def scoring(self, sampled: Any) -> Events:
        yield sampled
        with self.scorers.request() as place:
            yield place
            yield self.env.timeout(self.flow.score(self.draw))

    def place(self, engine: _Engine) -> Events:
        """Simulate one of the parallel places of an engine, which runs one call after another."""
        while True:
            call = yield self.calls.get()
            while self.open is not None or self.env.now < engine.up:
                yield self.open or self.env.timeout(engine.up - self.env.now)
            size, done = call.item
            work = self.env.process(self.sampling(engine, size))
            engine.at_work.add(work)
            began = self.env.now
            finished = yield work
            engine.at_work.discard(work)
            self.sampled += self.env.now - began
            if finished:
                done.succeed()
            else:
                self.repeated += 1
                self.calls.put(call)

    def sampling(self, engine: _Engine, size: int) -> Generator[Any, Any, bool]:
        try:
            if engine.version != self.version:
                engine.version = self.version
                yield self.env.timeout(self.flow.load)
            yield self.env.timeout(self.flow.sample(self.draw, size))
        except self.simpy.Interrupt:
            return False
        return True

    def kill(self, after: float) -> Events:
        yield self.env.timeout(after)
        self.lose(self.engines[0])

    def failures(self, engine: _Engine) -> Events:
        while True:
            yield self.env.timeout(self.draw.expovariate(1 / self.flow.between_failures))
            self.lose(engine)
            yield self.env.timeout(self.flow.restart)

    def lose(self, engine: _Engine) -> None:
        engine.up, engine.version = self.env.now + self.flow.restart, -1
        for work in list(engine.at_work):
            work.interrupt()
