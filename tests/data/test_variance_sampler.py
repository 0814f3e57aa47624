"""Drawing of prompts by the deviation of their rewards: chances, weights, estimates, state."""

from __future__ import annotations

import base64
import json
import math
import time

import numpy as np
import pytest

from rloo.data.reward_estimate import RewardedPrompt, RewardEstimate
from rloo.data.variance_sampler import VarianceSampler, draw_systematically
from rloo.types import Completion, Group, Prompt


def group_of(row: int, rewards, weight: float = 1.0) -> Group:
    members = [Completion([5, 2], "stop", [0.0, 0.0], [0.0, 0.0]) for _ in rewards]
    return Group(Prompt(row, [7], "x", weight=weight), members, ["x"] * len(rewards), rewards)


def known(group: Group) -> list[float]:
    return [reward for reward in group.rewards if reward is not None]


def make_sampler(
    rows=range(12), pools=None, *, seed=7, floor=0.25, lag=0, half_life=1e9
) -> VarianceSampler:
    estimate = RewardEstimate(pools or [""] * len(rows), half_life=half_life)
    return VarianceSampler(list(rows), estimate, known, seed=seed, floor=floor, lag=lag)


def reward(row: int, place: int) -> float:
    """Rows of three kinds: always solved, never solved, solved now and then."""
    return float((True, False, place % 2 == 0)[row % 3])


def play(sampler: VarianceSampler, rollouts: int, ahead: int = 0) -> list[list]:
    """The draws of some rollouts. `ahead` rollouts are drawn before the rewards of the oldest
    arrive."""
    drawn = [sampler.next(4) for _ in range(ahead)]
    for number in range(rollouts):
        drawn.append(sampler.next(4))
        answer(sampler, drawn[number])
    return drawn


def answer(sampler: VarianceSampler, draws) -> None:
    sampler.update([group_of(d.number, [reward(d.number, k) for k in range(4)], d.weight)
                    for d in draws])  # fmt: skip


def test_the_first_rollout_is_uniform_and_its_weights_are_exactly_1():
    for floor in (0.25, 0.3, 1e-3, 1.0):
        draws = make_sampler(floor=floor, rows=range(600)).next(32)
        assert [draw.weight for draw in draws] == [1.0] * 32


def test_the_chances_are_the_floor_plus_a_share_of_the_deviation():
    sampler = make_sampler(floor=0.4)
    play(sampler, 10)
    estimate = RewardEstimate([""] * 12, half_life=1e9)
    estimate.load_state_dict(sampler.state_dict()["estimate"])
    s = estimate.deviations()
    assert sampler.shares() / 12 == pytest.approx(0.4 / 12 + 0.6 * s / s.sum(), rel=1e-12)
    assert len(set(s)) > 2
    for draw in sampler.next(12):
        q = 0.4 / 12 + 0.6 * s[draw.number] / s.sum()
        assert draw.weight == pytest.approx(1 / (12 * q), rel=1e-12)
        assert draw.weight <= 1 / 0.4


@pytest.mark.parametrize("num", [1, 4, 9])
def test_each_prompt_is_drawn_as_often_as_its_chance_says(num):
    """Over all values of the one random number: the average count is num q, each count the one
    below or above it."""
    share = np.array([0.25, 2.5, 0.3, 1.7, 0.25])
    numbers = (np.arange(20_000) + 0.5) / 20_000
    drawn = [[index for index, _ in draw_systematically(share, num, u)] for u in numbers]
    counts = np.array([np.bincount(indices, minlength=5) for indices in drawn])
    assert (counts.sum(1) == num).all()
    expected = num * share / share.sum()
    assert counts.mean(0) == pytest.approx(expected, abs=1e-3)
    assert (counts >= np.floor(expected)).all() and (counts <= np.ceil(expected)).all()


def test_every_place_of_a_rollout_has_the_chances_of_all():
    """So that an optimizer step on a part of the rollout has them, too."""
    first = [make_sampler(seed=seed).next(4)[0].number for seed in range(4000)]
    assert np.bincount(first, minlength=12) / 4000 == pytest.approx([1 / 12] * 12, abs=0.02)


def test_draws_of_one_prompt_differ_in_their_noise():
    draws = make_sampler(rows=range(2)).next(16)
    ids = [Prompt(d.number, [7], "x", epoch=d.turn).noise_id for d in draws]
    assert len(set(ids)) == 16
    sampler = make_sampler(rows=range(2))
    sampler.drawn = 10**12
    last = Prompt(2**40 - 1, [7], "x", epoch=sampler.next(1)[0].turn)
    assert last.noise_id < 2**63


def test_prompts_that_pay_are_drawn_more_often():
    sampler = make_sampler()
    play(sampler, 40)
    share = sampler.shares()
    assert share[2::3].min() > 2.5 * max(share[0::3].max(), share[1::3].max())


def test_the_estimate_of_rewards_of_0_and_1_is_that_of_the_beta_prior():
    """E[p (1 - p) | n, sum] of a Beta(a, b) prior whose moments are those of the pool."""
    groups = [(0, [1, 1, 1, 0]), (1, [0, 0, 0, 0]), (2, [1, 0, 1, 0]), (3, [1, 1, 1, 1])]
    estimate = RewardEstimate(["all"] * 5, half_life=1e9)
    estimate.add([RewardedPrompt(n, 1.0, list(map(float, r))) for n, r in groups])
    flat = [r for _, some in groups for r in some]
    mean = sum(flat) / 16
    total = mean * (1 - mean)
    within = sum(sum((r - sum(g) / 4) ** 2 for r in g) for _, g in groups) / 12
    strength = within / (total - within)
    assert 0.25 < strength < 8
    expected = []
    for rewards in [*(g for _, g in groups), []]:
        a = strength * mean + sum(rewards)
        b = strength * (1 - mean) + len(rewards) - sum(rewards)
        expected.append(math.sqrt(a * b / ((a + b) * (a + b + 1))))
    assert estimate.deviations() == pytest.approx(expected, rel=1e-9)


def test_prompts_of_one_value_of_the_column_have_one_prior():
    sampler = make_sampler(range(300), pools=[str(row % 3) for row in range(300)])
    rollouts = play(sampler, 20)
    share = sampler.shares()
    drawn = {draw.number for rollout in rollouts for draw in rollout}
    unseen = [[share[n] for n in range(p, 300, 3) if n not in drawn] for p in range(3)]
    assert [len(set(some)) for some in unseen] == [1, 1, 1]
    assert unseen[2][0] > 2 * max(unseen[0][0], unseen[1][0])


def test_weights_correct_the_prior_for_the_way_in_which_prompts_were_drawn():
    """Prompts of two kinds, one drawn four times as often: the pool has equal parts of both."""
    estimates = []
    for times in ((1, 1), (4, 1)):
        estimate = RewardEstimate(["all"] * 3, half_life=1e9)
        rows = [(0, 1 / times[0], [1.0, 0.0])] * times[0] + [(1, 1.0, [1.0, 1.0])] * times[1]
        estimate.add([RewardedPrompt(*row) for row in rows])
        estimates.append(estimate.deviations()[2])
    assert estimates[0] == pytest.approx(estimates[1], rel=1e-12)


def test_an_estimate_fades_to_the_prior():
    estimate = RewardEstimate(["all"] * 3, half_life=2.0)
    estimate.add([RewardedPrompt(0, 1.0, [1.0] * 8), RewardedPrompt(1, 1.0, [1.0, 0.0] * 4)])
    before = estimate.deviations()
    for _ in range(40):
        estimate.add([])
    after = estimate.deviations()
    assert abs(before[0] - before[2]) > 0.1
    assert after[0] == pytest.approx(after[2], rel=1e-3)


def test_a_half_life_halves_the_counts():
    slow, fast = (RewardEstimate(["all"], half_life=h) for h in (1e9, 3.0))
    slow.add([RewardedPrompt(0, 0.5, [1.0, 0.0])])
    fast.add([RewardedPrompt(0, 1.0, [1.0, 0.0] * 2)])
    for _ in range(3):
        fast.add([])
    one, other = slow.state_dict()["counts"], fast.state_dict()["counts"]
    counts = [np.frombuffer(base64.b64decode(text)) for text in (one, other)]
    assert counts[0] == pytest.approx(counts[1], rel=1e-6)


def test_missing_rewards_are_no_rewards():
    sampler, other = make_sampler(), make_sampler()
    sampler.update([group_of(3, [1.0, None, 0.0, None]), group_of(4, [None] * 4)])
    other.update([group_of(3, [1.0, 0.0]), group_of(4, [])])
    assert np.array_equal(sampler.shares(), other.shares())
    assert not np.array_equal(sampler.shares(), make_sampler().shares())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_equal_rewards_of_all_prompts_leave_it_uniform(value):
    sampler = make_sampler()
    for _ in range(5):
        sampler.update([group_of(n, [value] * 4) for n in range(12)])
    assert sampler.shares() == pytest.approx([1.0] * 12)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_resumed_run_draws_the_same(lag):
    """Wherever it is stopped; with `lag`, rollouts are in flight that are drawn again."""
    whole = play(make_sampler(lag=lag, half_life=5.0), 12, ahead=lag)
    for stop in (1, 2, 5, 9):
        sampler = make_sampler(lag=lag, half_life=5.0)
        drawn = play(sampler, stop, ahead=lag)
        assert drawn == whole[: stop + lag]
        saved = json.loads(json.dumps(sampler.state_dict()))
        resumed = make_sampler(lag=lag, half_life=5.0)
        resumed.next(2)  # a restored position replaces the present one
        resumed.load_state_dict(saved)
        assert resumed.drawn == 4 * stop
        rest = [resumed.next(4) for _ in range(lag)]
        for number in range(12 - stop):
            rest.append(resumed.next(4))
            answer(resumed, rest[number])
        assert rest == whole[stop:]


def test_with_a_lag_the_last_rewards_do_not_matter():
    """A draw is the same whether the rewards of the last `lag` rollouts are known or not."""
    early, late = make_sampler(lag=2), make_sampler(lag=2)
    drawn = play(early, 8, ahead=2)
    known_later = []
    for number in range(8):
        known_later.append(late.next(4))
        answer(late, known_later[number])
    assert drawn[:8] == known_later


def test_a_position_without_estimates_or_of_another_column_is_refused():
    with pytest.raises(ValueError, match="has no estimates of rewards; resume with the prompt_sa"):
        make_sampler().load_state_dict({"drawn": 3})
    saved = make_sampler(pools=["a", "b"] * 6).state_dict()
    with pytest.raises(ValueError, match=r"has 2 values of the column, and the dataset has 1"):
        make_sampler().load_state_dict(saved)


@pytest.mark.slow
def test_the_bookkeeping_of_a_rollout_takes_milliseconds():
    """Printed by benchmarks; here only that no step loops over all prompts in Python."""
    rows = range(200_000)
    sampler = make_sampler(rows, pools=[str(row % 5) for row in rows])
    began = time.perf_counter()
    play(sampler, 10)
    assert (time.perf_counter() - began) / 10 < 0.2
