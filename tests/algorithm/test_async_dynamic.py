"""`dynamic_sample` with groups that finish in any order: the trained groups follow from the rewards
alone, and none is sampled by weights that are too old."""

import itertools
import threading
import time
from concurrent.futures import Future

import pytest

from rloo.algorithm.async_rollout import AsyncRolloutGenerator
from rloo.algorithm.async_schedule import allowed_groups
from rloo.rewards.reward_function import RewardLog
from rloo.rewards.reward_set import RawScores
from rloo.types import Completion, EngineCapabilities
from support.training import make_config, make_trainer

WANTED, REFILLS = 2, 1


def windows(flat: list[bool]) -> list[list[int]]:
    """The groups that each rollout samples, by the rule of `SyncRolloutGenerator`."""
    found, start = [], 0
    while start + WANTED * (REFILLS + 1) <= len(flat):
        own, missing = [], WANTED
        for _ in range(REFILLS + 1):
            part = range(start, start + missing)
            own, start = [*own, *part], start + missing
            missing = sum(flat[n] for n in part)
        found.append(own)
    return found


def trained(flat: list[bool]) -> list[list[int]]:
    """The groups that each rollout trains: those with a signal, and flat ones in empty places."""
    return [sorted(own, key=lambda n: flat[n])[:WANTED] for own in windows(flat)]


def test_no_group_is_begun_too_early_whatever_is_known_of_the_groups_before_it():
    """All rewards of 9 groups, all sets of finished groups, at every rollout."""
    for flat in itertools.product([False, True], repeat=9):
        for version, own in enumerate(windows(list(flat))):
            rollout_of = {n: r for r, some in enumerate(windows(list(flat))) for n in some}
            for staleness, known in itertools.product(
                range(2), itertools.product([0, 1], repeat=4)
            ):
                seen = [f and bool(k) for f, k in zip(flat[own[0] :], known, strict=False)]
                count = allowed_groups(seen, WANTED, REFILLS, WANTED, REFILLS, staleness)
                assert count >= WANTED * (staleness + 1)
                for number in range(own[0], own[0] + count):
                    assert rollout_of.get(number, version) <= version + staleness


class Finishes:
    """Finishes one group after the other, in the order of `choices`: an index in those that are
    under way. Prompts in `flat` get equal rewards."""

    capabilities = EngineCapabilities(
        "scripted", True, False, exact_noise=True, filters=True, central=True
    )

    def __init__(self, flat, choices):
        self.version, self.flat, self.choices, self.over = -1, flat, list(choices), False
        self.begun, self.changed = [], threading.Condition()
        self.thread = threading.Thread(target=self._finish_all, daemon=True)
        self.thread.start()

    def load(self, weights, version):
        self.version = version

    def submit(self, prompts, count, sampling, noise):
        futures = [Future() for _ in prompts]
        with self.changed:
            span = ((self.version, 3),)
            self.begun += [(p, count, span, f) for p, f in zip(prompts, futures, strict=True)]
            self.changed.notify_all()
        return futures

    def _finish_all(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.begun or self.over)
                if self.over:
                    return
                choice = self.choices.pop(0) if self.choices else 0
                prompt, count, span, future = self.begun.pop(choice % len(self.begun))
            tokens = [[5, 6 if prompt.id in self.flat else 6 + k, 2] for k in range(count)]
            logs = [-1.0] * 3
            future.set_result(
                [Completion(t, "stop", logs, logs, weight_versions=span) for t in tokens]
            )

    def close(self):
        with self.changed:
            self.over = True
            self.changed.notify_all()
        self.thread.join()

    def wait(self):
        """Wait until nothing is under way."""
        while self.begun:
            time.sleep(0.001)
        time.sleep(0.002)

    def cancel_pending(self):
        with self.changed:
            self.begun.clear()

    def busy_seconds(self):
        return 0.0

    def stats(self):
        return {}


class ScoresHere:
    """Calls the reward at once."""

    size, lost = 1, 0

    def submit(self, seed, make, state=b""):
        _, texts, ids, _ = make()
        done: Future = Future()
        name = second_token.__name__
        scores = {name: second_token(ids)}
        done.set_result((texts, RawScores(len(ids), scores, {name: RewardLog()})))
        return done

    def busy_seconds(self):
        return 0.0

    def cancel_pending(self):
        pass

    def close(self):
        pass


def second_token(completion_ids, **_):
    return [float(ids[1]) for ids in completion_ids]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    config = make_config(
        tmp_path_factory.mktemp("run"), max_staleness=1, sampler_processes=1, max_steps=4,
        num_prompts=WANTED, dynamic_sample=True,
        prompt_sampling_kwargs={"max_resample_times": REFILLS},
        async_kwargs={"reward_workers": 1},
    )  # fmt: skip
    made = make_trainer(config, reward=second_token).make_parts()[0].rollouts
    assert isinstance(made, AsyncRolloutGenerator)
    made.scorers.close()
    made.scorers = ScoresHere()
    return made


def run(rollouts, flat, choices, *, begin=None, version=0, eager=False):
    """Four rollouts, or those that are left: the prompts of each, and what a checkpoint has."""
    rollouts.engine = Finishes(flat, choices)
    found = []
    try:
        rollouts.load_state_dict(begin or START, step=version)
        for number in range(version, 4):
            rollouts.engine.load(None, number)
            if eager:
                rollouts.engine.wait()
            rollout = rollouts.next()
            assert rollout.metrics["staleness/max"] <= 1
            first = rollout.metrics["groups/first"]
            found.append((first, [g.prompt.id for g in rollout.groups], rollout.position))
    finally:
        rollouts.engine.close()
    return found


START: dict = {}


def test_every_finishing_order_trains_the_same_groups(rollouts):
    """Groups 1, 2, 3 and 6 are flat; 4 rollouts, 128 orders, with early and late knowledge."""
    START.update(rollouts.state_dict())
    order = rollouts.prompts.next(16)
    assert len({p.id for p in order[:8]}) == 8
    flat = {order[n].id for n in (1, 2, 3, 6)}
    outcomes = [p.id in flat for p in order]
    expected = trained(outcomes)[:4]
    assert expected == [[0, 1], [4, 5], [7, 8], [9, 10]]
    first = run(rollouts, flat, [])
    assert [own for _, own, _ in first] == [[order[n].id for n in own] for own in expected]
    assert [number for number, *_ in first] == [own[0] for own in windows(outcomes)][:4]
    for choices in itertools.product(range(4), range(4), range(4)):
        for eager in (False, True):
            assert run(rollouts, flat, choices, eager=eager) == first


@pytest.mark.parametrize("stop", range(1, 4))
def test_a_resumed_run_goes_on_with_the_next_group(rollouts, stop):
    START.update(rollouts.state_dict() if not START else {})
    order = rollouts.prompts
    order.load_state_dict(START["prompts"])
    flat = {p.id for p in order.next(4)[1:]}
    whole = run(rollouts, flat, [])
    again = run(rollouts, flat, [1, 0, 2], begin=whole[stop - 1][2], version=stop)
    assert again == whole[stop:]
