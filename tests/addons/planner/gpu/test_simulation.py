"""The simulation against what can be computed by hand, and against queueing theory."""

import builtins
from math import exp

import pytest

from rloo.addons.planner.gpu.simulation import SimulatedRun, simulate


def flow(**changes) -> SimulatedRun:
    usual = {
        "groups": 4,
        "rollouts": 40,
        "staleness": 0,
        "sample": lambda _, groups: 3.0,
        "train": lambda _: 2.0,
    }
    return SimulatedRun(**{**usual, **changes})


def test_one_after_the_other_takes_the_sum():
    course = simulate(flow(publish=0.25, load=0.5))
    assert course.ends[0] == pytest.approx(0.25 + 0.5 + 3 + 2)
    assert course.seconds_a_rollout() == pytest.approx(5.75)
    assert course.trainer_busy == pytest.approx(2 / 5.75)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("staleness", [1, 3])
def test_beside_each_other_they_take_the_longer_of_the_two(share, staleness):
    """The bound 1 / max(share, 1 - share), where nothing varies."""
    beside = simulate(
        flow(
            staleness=staleness,
            sample=lambda _, groups: 10 * share,
            train=lambda _: 10 * (1 - share),
        )
    )
    assert beside.seconds_a_rollout(10) == pytest.approx(10 * max(share, 1 - share))
    assert beside.most_in_flight == 4 * (staleness + 1)


def test_groups_are_scored_side_by_side_by_as_many_workers():
    one = simulate(flow(score=lambda _: 0.5, reward_workers=1))
    two = simulate(flow(score=lambda _: 0.5, reward_workers=2))
    assert one.seconds_a_rollout() == pytest.approx(3 + 4 * 0.5 + 2)
    assert two.seconds_a_rollout() == pytest.approx(3 + 2 * 0.5 + 2)


def test_groups_are_dealt_to_engines_as_these_are_done():
    """Seven groups on two engines with one place each: four turns."""
    course = simulate(flow(groups=7, engines=2, groups_a_call=1))
    assert course.seconds_a_rollout() == pytest.approx(4 * 3 + 2)
    wide = simulate(flow(groups=7, engines=1, at_once=4, groups_a_call=1))
    assert wide.seconds_a_rollout() == pytest.approx(2 * 3 + 2)


def test_a_rollout_takes_as_long_as_the_longest_of_its_groups():
    """The mean of the longest of n exponential times is the harmonic number of n."""
    course = simulate(
        flow(
            groups=10,
            rollouts=1000,
            engines=10,
            groups_a_call=1,
            sample=lambda draw, _: draw.expovariate(1.0),
            train=lambda _: 0.0,
        )
    )
    assert course.seconds_a_rollout() == pytest.approx(sum(1 / n for n in range(1, 11)), rel=0.05)


@pytest.mark.slow
def test_staleness_smooths_what_varies():
    """Two exponential stages with a buffer: the trainer's share of a closed line of n = S + 1
    rollouts with equal means is n / (n + 1) (Buzen's product form for two queues)."""
    for staleness in (0, 1, 4):
        course = simulate(
            flow(
                groups=1,
                rollouts=4000,
                staleness=staleness,
                sample=lambda draw, _: draw.expovariate(1.0),
                train=lambda draw: draw.expovariate(1.0),
            )
        )
        rollouts = staleness + 1
        assert course.trainer_busy == pytest.approx(rollouts / (rollouts + 1), rel=0.05)


def test_what_is_killed_is_done_again_after_the_restart():
    """Killed 1 s into the sampling of the third rollout: that second, and the restart, are lost."""
    quiet, killed = simulate(flow()), simulate(flow(kills={1: 1.0}, restart=7.0))
    assert killed.repeated == 1
    assert killed.ends[-1] - quiet.ends[-1] == pytest.approx(1.0 + 7.0)


@pytest.mark.slow
def test_failures_cost_what_they_should():
    """A call of 3 s on an engine that fails every 30 s in the mean, with a restart of 5 s: the
    expected time to finish is (m + r)(e^(c/m) - 1), for repeated calls with an exponential
    time to failure m (and no failure during a restart, or while nothing is under way)."""
    course = simulate(flow(rollouts=5000, train=lambda _: 0.0, between_failures=30.0, restart=5.0))
    assert course.seconds_a_rollout() == pytest.approx((30 + 5) * (exp(3 / 30) - 1), rel=0.05)


def test_versions_wait_for_what_is_under_way_where_servers_are_drained():
    """Of two rollouts in flight on two engines, the second must end before a version goes out."""

    def lengths():
        turns = iter([1.0, 9.0, 5.0])
        return lambda *_: next(turns)

    usual = {"groups": 1, "engines": 2, "staleness": 1, "rollouts": 3, "train": lambda _: 1.0}
    assert simulate(flow(sample=lengths(), **usual)).ends[0] == pytest.approx(2.0)
    free = simulate(flow(sample=lengths(), **usual))
    held = simulate(flow(sample=lengths(), drains=True, **usual))
    assert free.ends[1] == held.ends[1] == pytest.approx(10.0)
    assert (free.ends[2], held.ends[2]) == pytest.approx((11.0, 15.0))


def test_equal_seeds_give_equal_courses():
    def of(seed):
        return simulate(flow(sample=lambda draw, _: draw.random(), seed=seed)).ends

    assert of(1) == of(1) != of(2)


def test_without_simpy_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **how):
        if name == "simpy":
            raise ModuleNotFoundError("No module named 'simpy'", name="simpy")
        return real(name, *rest, **how)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'simpy<"):
        simulate(flow())
