"""Which group is begun when, in what order groups are trained, and where a resumed run goes on: a
schedule in which the test decides who is done first. No process is started here."""

import random
from concurrent.futures import Future
from dataclasses import replace

import pytest

from rloo.algorithm.async_rollout import AsyncRolloutGenerator
from rloo.types import Completion, EngineCapabilities, Prompt
from support.markers import in_pairs
from support.training import make_config, make_trainer


class Counting:
    """An object, so that it is called in this process."""

    def __call__(self, completion_ids, **_):
        return [float(sum(ids)) for ids in completion_ids]


class Scripted:
    """Has sampled a group when it is told to, with the weights that it was given last."""

    capabilities = EngineCapabilities(
        "scripted", True, False, exact_noise=True, filters=True, central=True
    )

    def __init__(self):
        self.version, self.begun, self.forgotten = -1, [], 0

    def load(self, weights, version):
        self.version = version

    def submit(self, prompts, count, sampling, noise):
        futures = [Future() for _ in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            self.begun.append((prompt, count, noise, future))
        return futures

    def finish(self, number: int, version: int | None = None) -> None:
        prompt, count, noise, future = self.begun[number]
        tokens = [[5 + (prompt.id + noise + k) % 50, 2] for k in range(count)]
        span = ((self.version if version is None else version, 2),)
        logs = [-1.0, -1.0]
        future.set_result([Completion(t, "stop", logs, logs, weight_versions=span) for t in tokens])

    def cancel_pending(self):
        self.forgotten += 1

    def busy_seconds(self):
        return 0.0

    def stats(self):
        return {}


def make_rollouts(folder, staleness: int, **options) -> AsyncRolloutGenerator:
    config = make_config(
        folder,
        max_staleness=staleness,
        sampler_processes=1,
        **{"max_steps": 6, "num_prompts": 2, **options},
    )
    rollouts = make_trainer(config, reward=Counting()).make_parts()[0].rollouts
    assert isinstance(rollouts, AsyncRolloutGenerator) and rollouts.scorers is None
    return replace(rollouts, engine=Scripted())


def begin(rollouts: AsyncRolloutGenerator) -> None:
    """What the gate lets through is begun when the rollout is asked for; here before."""
    rollouts._begin(rollouts.batches.prompts_per_rollout)


def train(rollouts: AsyncRolloutGenerator, version: int, order=None):
    """The next rollout, its groups done in a random order, for weights of this version."""
    engine = rollouts.engine
    engine.load(None, version)
    before = len(engine.begun)
    begin(rollouts)
    ready = [n for n, (*_, future) in enumerate(engine.begun) if not future.done()]
    random.Random(order).shuffle(ready)
    for number in ready:
        engine.finish(number)
    return rollouts.next(), len(engine.begun) - before


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_groups_are_begun_as_the_gate_allows_and_trained_in_their_order(tmp_path, staleness):
    rollouts = make_rollouts(tmp_path, staleness)
    usual = make_trainer(make_config(tmp_path, num_prompts=2)).make_parts()[0].rollouts
    numbers, trained = [], []
    for version in range(6):
        rollout, begun = train(rollouts, version, order=version)
        # n < (staleness + version + 1) x 2, and no more than the run will train.
        total = min(staleness + version + 1, 6) * 2
        assert len(rollouts.engine.begun) == total
        assert begun == total - (min(staleness + version, 6) * 2 if version else 0)
        numbers.append(rollout.metrics["groups/first"])
        trained += [group.prompt for group in rollout.groups]
        assert rollout.version == version
        assert rollout.epoch == pytest.approx(2 * (version + 1) / 12)
    expected = usual.prompts.next(12)
    assert numbers == [0, 2, 4, 6, 8, 10]
    assert [(p.id, p.epoch) for p in trained] == [(p.id, p.epoch) for p in expected]


def test_noise_is_that_of_the_synchronous_run(tmp_path):
    """Keyed by the rollout's own first step, however far ahead it was begun."""
    ahead, usual = make_rollouts(tmp_path, 3), make_rollouts(tmp_path, 0)
    for version in range(6):
        train(ahead, version)
        train(usual, version)
    noise = [[(p.id, n) for p, _, n, _ in r.engine.begun] for r in (ahead, usual)]
    assert noise[0] == noise[1] and len(set(noise[0])) == 12


@pytest.mark.parametrize(("stop", "staleness"), in_pairs(range(6), [0, 1, 3]))
def test_a_run_that_ends_anywhere_goes_on_with_the_next_group(tmp_path, staleness, stop):
    """Nothing is skipped and nothing repeated, whatever was begun."""
    whole = make_rollouts(tmp_path, staleness)
    undisturbed = [train(whole, version)[0] for version in range(6)]
    first = make_rollouts(tmp_path, staleness)
    position, done = first.state_dict(), []
    for version in range(stop):
        rollout, _ = train(first, version)
        position = rollout.position
        done.append(rollout)
    # More is under way, of which some is done.
    first._begin(2)
    for number in range(2 * stop, len(first.engine.begun), 2):
        if not first.engine.begun[number][-1].done():
            first.engine.finish(number)
    second = make_rollouts(tmp_path, staleness)
    second.load_state_dict(position, step=stop)
    done += [train(second, version)[0] for version in range(stop, 6)]
    assert [r.metrics["groups/first"] for r in done] == [0, 2, 4, 6, 8, 10]
    for ours, theirs in zip(done, undisturbed, strict=True):
        assert [g.prompt.id for g in ours.groups] == [g.prompt.id for g in theirs.groups]
        assert ours.position == theirs.position and ours.epoch == theirs.epoch


def test_going_back_in_one_object_gives_up_what_was_begun(tmp_path):
    rollouts = make_rollouts(tmp_path, 2)
    first, _ = train(rollouts, 0)
    train(rollouts, 1)
    rollouts.load_state_dict(first.position, step=1)
    assert rollouts.engine.forgotten == 1 and rollouts.epoch == first.epoch
    again, begun = train(rollouts, 1)
    assert begun == 6 and again.metrics["groups/first"] == 2


def test_age_is_counted_in_rollouts_and_never_beyond_what_is_allowed(tmp_path):
    rollouts = make_rollouts(tmp_path, 1)
    engine = rollouts.engine
    ages = []
    for version in (10, 11, 11, 14):  # weights that a step left as they were keep their version
        engine.load(None, version)
        begin(rollouts)
        for number, (*_, future) in enumerate(engine.begun):
            if not future.done() and number < 2 * (len(ages) + 1):
                engine.finish(number, version=10 if number == 2 else None)
        rollout = rollouts.next()
        ages.append((rollout.metrics["staleness/mean"], rollout.metrics["staleness/max"]))
    assert ages == [(0, 0), (0.5, 1), (0, 0), (0, 0)]


@pytest.mark.parametrize("wrong", [10, 99], ids=["two rollouts ago", "unknown"])
def test_older_weights_than_allowed_or_unknown_ones_end_the_run(tmp_path, wrong):
    rollouts = make_rollouts(tmp_path, 1)
    for version in (10, 11):
        train(rollouts, version)
    rollouts.engine.load(None, 13)
    for number in (4, 5):
        future = rollouts.engine.begun[number][-1]
        done = [replace(c, weight_versions=((wrong, 2),)) for c in future.result()]
        future._result = done
    with pytest.raises(RuntimeError, match=rf"group 4 was sampled by version {wrong} of the"):
        rollouts.next()


def test_weights_that_an_evaluation_loads_in_between_are_as_old_as_those_before(tmp_path):
    rollouts = make_rollouts(tmp_path, 2)
    train(rollouts, 10)
    rollouts.engine.load(None, 13)
    begin(rollouts)
    for number in (2, 3):
        future = rollouts.engine.begun[number][-1]
        future._result = [replace(c, weight_versions=((12, 2),)) for c in future.result()]
    assert rollouts.next().metrics["staleness/max"] == 1


def test_a_run_that_is_closed_has_drawn_nothing_that_it_has_not_trained(tmp_path):
    rollouts = make_rollouts(tmp_path, 3)
    first, _ = train(rollouts, 0)
    expected = [group.prompt for group in [*rollouts._pending][:2]]
    rollouts.close()
    assert rollouts.engine.forgotten == 1
    assert [p.id for p in rollouts.prompts.next(2)] == [p.id for p in expected]
    assert rollouts.epoch == first.epoch


def test_what_fails_elsewhere_is_raised_when_its_rollout_is_due(tmp_path):
    rollouts = make_rollouts(tmp_path, 1)
    rollouts.engine.load(None, 0)
    begin(rollouts)
    for number in (0, 1, 3):
        rollouts.engine.finish(number)
    rollouts.engine.begun[2][-1].set_exception(OSError("is gone"))
    rollouts.next()
    rollouts.engine.load(None, 1)
    with pytest.raises(OSError, match="is gone") as caught:
        rollouts.next()
    assert caught.value.in_run


def test_images_do_not_travel_to_another_process(tmp_path):
    engine = make_trainer(make_config(tmp_path, sampler_processes=1)).engine
    prompt = Prompt(3, [4], "", pixels=dict)
    sampling = make_rollouts(tmp_path, 0).sampling
    with pytest.raises(ValueError, match="prompt 3 has images"):
        engine.submit([prompt], 2, sampling, 0)


# -- generation batches of several optimizer steps ------------------------------------------------


def make_divided(folder, staleness=1, **options):
    """Three optimizer steps of two groups for each generation batch."""
    sizes = {"generation_batch_size": 24, "num_generations": 4, "max_steps": 12}
    return make_rollouts(folder, staleness, **sizes, **options)


def test_a_step_begins_when_its_own_groups_are_done(tmp_path):
    rollouts = make_divided(tmp_path)
    engine, gate = rollouts.engine, []
    for step in range(12):
        if rollouts.needs_weights:
            engine.load(None, step)
        begin(rollouts)
        gate.append(len(engine.begun))
        for number in range(2 * step, 2 * step + 2):  # all others go on
            engine.finish(number, version=engine.version)
        rollout = rollouts.next()
        assert [group.prompt for group in rollout.groups] == [
            prompt for prompt, *_ in engine.begun[2 * step : 2 * step + 2]
        ]
    assert engine.version == 9  # new weights after every third step
    # As many groups ahead as max_staleness 1 allows: those of three steps.
    assert gate == [min(2 * (step + 4), 24) for step in range(12)]


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_group_of_a_divided_batch_is_too_old(tmp_path, staleness):
    """Each group is sampled as early as the gate allows."""
    rollouts = make_divided(tmp_path, staleness)
    engine, ages = rollouts.engine, []
    for step in range(12):
        if rollouts.needs_weights:
            engine.load(None, step)
        begin(rollouts)
        for number, (*_, future) in enumerate(engine.begun):
            if not future.done():
                engine.finish(number)
        ages.append(rollouts.next().metrics["staleness/max"])
    assert ages == [min(step // 3, staleness) for step in range(12)]
    late = make_divided(tmp_path / "late", staleness)
    for step in range(3 * staleness + 3):
        if late.needs_weights:
            late.engine.load(None, step)
        begin(late)
        for number in range(2 * step, 2 * step + 2):
            late.engine.finish(number, version=0)
        late.next()
    late.engine.load(None, 3 * staleness + 3)
    begin(late)
    for number in range(6 * staleness + 6, 6 * staleness + 8):
        late.engine.finish(number, version=0)
    with pytest.raises(RuntimeError, match="sampled by version 0 of the weights, and at most"):
        late.next()


@pytest.mark.parametrize(
    "options", [{"num_iterations": 2}, {"estimator": "shrinkage"}, {"num_prompts": None,
    "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}],
)  # fmt: skip
def test_a_batch_that_is_needed_as_a_whole_is_not_divided(tmp_path, options):
    """For several passes, for an estimator over all groups, and for steps of parts of groups."""
    batches = make_divided(tmp_path, **options).batches
    assert batches.completions_per_rollout == 24 and batches.rollouts_per_version == 1
