"""The probe: what it predicts, when it is used, and draws among candidates."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from rloo.data.probe_sampler import ProbedEstimate, ProbeSampler
from rloo.data.reward_probe import Moments, RewardProbe, RidgeRegression
from rloo.types import Group, Prompt

SIZE = 6
USUAL = Moments(0.4, 0.1, 0.1, 2.0)


def features(number: int) -> np.ndarray:
    """Six numbers of each prompt, of which the third tells whether it pays."""
    noise = np.sin(np.arange(1, SIZE + 1) * (number + 1.7)) * 2.0
    noise[2] = 3.0 * (number % 3 == 2) + 0.1 * noise[2]
    return noise + 5.0


def nothing(number: int) -> np.ndarray:
    return np.sin(np.arange(1, SIZE + 1) * (number * number + 1.7))


def make_sampler(size=400, *, look=features, lag=0, each=2) -> ProbeSampler:
    estimate = ProbedEstimate([""] * size, half_life=50.0, size=SIZE)
    sampler = ProbeSampler(
        list(range(size)), estimate, lambda g: g.rewards,
        seed=7, floor=0.25, lag=lag, candidates_per_prompt=each,
    )  # fmt: skip
    sampler.look = lambda numbers: np.stack([look(number) for number in numbers.tolist()])
    return sampler


def answer(sampler, draws) -> None:
    rewards = [[float(d.number % 3 == 2 and k % 2 == 0) for k in range(4)] for d in draws]
    groups = [
        Group(Prompt(d.number, [7], "x", weight=d.weight), [], [], r)
        for d, r in zip(draws, rewards, strict=True)
    ]
    sampler.update(groups)


def play(sampler, rollouts, ahead=0) -> list[list]:
    drawn = [sampler.next(8) for _ in range(ahead)]
    for number in range(rollouts):
        drawn.append(sampler.next(8))
        answer(sampler, drawn[number])
    return drawn


def test_predictions_are_those_of_ridge_regression():
    """Against weighted least squares with the penalty as additional rows."""
    rng = np.random.default_rng(0)
    ridge = RidgeRegression(4)
    x, y = rng.normal(size=(30, 4)) * [1, 2, 3, 4] + 1, rng.random(30)
    for part in range(3):
        rows = range(10 * part, 10 * part + 10)
        ridge.add([[*x[n], y[n]] for n in rows], decay=0.5 ** (1 / 5.0))
    weight = np.repeat(0.5 ** (np.array([2, 1, 0]) / 5.0), 10)
    mean, target = weight @ x / weight.sum(), weight @ y / weight.sum()
    scale = np.sqrt((weight @ (x - mean) ** 2).sum() / weight.sum())
    left = np.vstack([np.sqrt(weight)[:, None] * (x - mean) / scale, np.sqrt(0.7) * np.eye(4)])
    right = np.concatenate([np.sqrt(weight) * (y - target), np.zeros(4)])
    slopes = np.linalg.lstsq(left, right, rcond=None)[0]
    new = rng.normal(size=(5, 4))
    expected = target + (new - mean) / scale @ slopes
    assert ridge.predict(new, 0.7) == pytest.approx(expected, rel=1e-9)
    assert RidgeRegression(4).predict(new, 0.7) is None


PREDICTS = """
import hashlib
import numpy as np
from rloo.data.reward_probe import Moments, RewardProbe

def features(number):
    return np.sin(np.arange(1, 129) * (number + 1.7) * 0.37)

probe, usual = RewardProbe(128, half_life=50.0), Moments(0.4, 0.1, 0.05, 2.0)
probe.add([(features(n).tolist(), [n % 3 / 3, n % 2], n / 200, 0.4) for n in range(200)], usual)
found = probe.predict(np.stack([features(n) for n in range(300, 316)], dtype=np.float32), usual)
assert len({*found[1].tolist()}) > 9
print(hashlib.sha256(np.stack(found).tobytes()).hexdigest())
"""


def test_predictions_are_the_same_bits_on_any_number_of_threads_and_processor():
    """LAPACK's depend on both."""
    others = ("OPENBLAS_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=4", "OPENBLAS_CORETYPE=Prescott")
    found = [
        subprocess.run(
            [sys.executable, "-c", PREDICTS],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | dict([other.split("=")]),
            capture_output=True, text=True, check=True,
        ).stdout
        for other in others
    ]  # fmt: skip
    assert len({*found}) == 1 and found[0]


def test_a_constant_feature_predicts_nothing():
    """Also where a later prompt has another value of it."""
    rng = np.random.default_rng(0)
    ridge, without = RidgeRegression(3), RidgeRegression(3)
    x, y = rng.normal(size=(40, 3)), rng.random(40)
    for number in range(40):
        ridge.add([[*x[number, :2], 0.3, y[number]]], decay=0.9)
        without.add([[*x[number, :2], 0.0, y[number]]], decay=0.9)
    new = rng.normal(size=(6, 3)) * 9
    expected = without.predict(new * [1, 1, 0], 1.0)
    assert ridge.predict(new, 1.0) == pytest.approx(expected, rel=1e-9)
    assert max(expected) > min(expected) + 0.1


def test_without_any_feature_that_varies_the_prediction_is_the_mean():
    ridge = RidgeRegression(2)
    for _ in range(500):  # the sums are rounded
        ridge.add([[0.1, 1000 / 3, y] for y in (0.0, 1.0, 0.5, 0.9)], decay=0.99)
    found = ridge.predict(np.array([[0.1, 1000 / 3], [2.0, 9.0]]), 0.1)
    assert found == pytest.approx([0.6, 0.6])


def test_the_variance_within_prompts_is_a_parabola_of_the_predicted_mean():
    """Rewards of 0 and 1 with a chance p: the variance is p (1 - p), whatever the scale of the
    predictions is. Means far outside of those that were seen have a positive variance."""
    moments = Moments(0.5, 0.15, 0.04, 8.0)
    probe = RewardProbe(1, half_life=1e9)
    for step in range(11):
        told, chance = 0.4 + 0.02 * step, step / 10
        passed = [1.0] * step + [0.0] * (10 - step)
        assert np.var(passed) == pytest.approx(chance * (1 - chance))
        probe.add([([told], passed, told, 0.5) for _ in range(400)], moments)
    new = np.array([[0.4], [0.44], [0.5], [0.56], [0.6], [9.0]])
    mean, within = probe.predict(new, moments)
    assert mean[:5] == pytest.approx([0.0, 0.2, 0.5, 0.8, 1.0], abs=0.03)
    # The predictions are better now: the parabola is that of the earlier ones, (p + 4) / 10.
    earlier = np.clip((mean - 0.4) / 0.2, -0.5, 1.5)
    expected = 10 / 9 * earlier * (1 - earlier)
    assert within == pytest.approx(np.maximum(expected, 0.01 * 0.15), abs=0.02)
    assert min(within) > 0


def test_the_metrics_compare_predictions_with_later_rewards():
    probe = RewardProbe(1, half_life=1e12)
    rows = [(0.5, 0.4, [1.0, 0.0]), (0.9, 0.4, [1.0, 1.0]), (0.0, 0.4, [0.0, 0.0])]
    probe.add([([1.0], rewards, told, prior) for told, prior, rewards in rows], USUAL)
    errors = [(0.5 - 0.5) ** 2 + (1 - 0.9) ** 2 + 0, 0.1**2 + 0.6**2 + 0.4**2]
    assert probe.explained == pytest.approx(1 - errors[0] / errors[1])
    steps = [0.1, 0.5, -0.4]
    slope = (0.1 * steps[0] + 0.6 * steps[1] - 0.4 * steps[2]) / sum(s * s for s in steps)
    assert probe.slope == pytest.approx(slope)
    assert probe.error is None  # three prompts confirm nothing


@pytest.mark.parametrize("each", [2, None])
def test_a_probe_that_knows_draws_prompts_that_were_never_seen(each):
    """Most often if all prompts are candidates."""
    sampler = make_sampler(each=each)
    play(sampler, 12)
    assert sampler.estimate.probe.explained > 0.8
    assert sampler.estimate.probe.slope == pytest.approx(1.0, abs=0.2)
    assert set(sampler.stats()) == {
        "prompt_sampling/probe_explained", "prompt_sampling/probe_slope"
    }  # fmt: skip
    late = [draw for draws in play(sampler, 10) for draw in draws]
    assert np.mean([draw.number % 3 == 2 for draw in late]) > (0.55 if each else 0.6)
    assert max(draw.weight for draw in late) <= 4 * (1 + 1e-12)


def test_a_probe_that_knows_nothing_is_not_used():
    sampler = make_sampler(look=nothing)
    play(sampler, 12)
    assert sampler.estimate.probe.error is None
    numbers = np.arange(400)
    found = sampler.estimate.deviations_among(numbers, np.stack([nothing(n) for n in range(400)]))
    assert found.deviation_M == pytest.approx(sampler.estimate.deviations(), rel=1e-12)


@pytest.mark.parametrize(("look", "used"), [(features, True), (nothing, False)])
def test_candidates_are_read_only_while_the_predictions_are_used(look, used):
    sampler = make_sampler(look=look)
    play(sampler, 12)
    read, usual = [], sampler.look
    sampler.look = lambda numbers: (read.extend(numbers.tolist()), usual(numbers))[1]
    expected = sampler.candidates(8).tolist()
    drawn = sorted({draw.number for draw in sampler.next(8)})
    assert set(drawn) < set(expected)
    assert read == (expected if used else drawn)


@pytest.mark.parametrize("size", [20, 32, 60, 400, 10_000])
def test_candidates_are_different_and_all_alike_often(size):
    sampler = make_sampler(size)
    times = np.zeros(size)
    for sampler.drawn in range(300):
        found = sampler.candidates(8)
        assert len(set(found.tolist())) == len(found) == min(size, 16)
        times[found] += 1
    rate = min(1.0, 16 / size)
    assert times[: size // 2].sum() / times.sum() == pytest.approx(0.5, abs=0.03)
    bound = 6 * math.sqrt(300 * rate * (1 - rate)) + 3 * (size > 1000) + 1e-9
    assert abs(times - 300 * rate).max() <= bound


@pytest.mark.parametrize("kind", [features, nothing])
def test_the_expected_sum_over_candidates_and_draws_is_the_mean_over_all_prompts(kind):
    """All sets of 4 of 6 candidates, all draws of one prompt: 1e-12, whatever was learned."""
    sampler = make_sampler(60, look=kind)
    play(sampler, 20)
    values = np.array([1.0, -3.0, 0.5, 7.0, 2.0, -1.0])
    total, sets = 0.0, list(itertools.combinations(range(6), 4))
    for chosen in sets:
        numbers = np.array(chosen)
        found = sampler.estimate.deviations_among(numbers, np.stack([kind(n) for n in chosen]))
        assert len(set(found.deviation_M.round(9))) > 1
        share = 0.25 + 0.75 * found.deviation_M / found.deviation_M.mean()
        edges = np.concatenate([[0.0], share.cumsum() / share.sum()])
        for low, high in itertools.pairwise(edges):
            ((number, weight, _),) = sampler.draw_among(
                numbers, found.deviation_M, 1, (low + high) / 2
            )
            total += (high - low) * weight * values[number] / len(sets)
    assert total == pytest.approx(values.mean(), abs=1e-12)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_draws_the_same(lag):
    whole = play(make_sampler(lag=lag), 12, ahead=lag)
    for stop in (1, 7):
        sampler = make_sampler(lag=lag)
        assert play(sampler, stop, ahead=lag) == whole[: stop + lag]
        resumed = make_sampler(lag=lag)
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        rest = [resumed.next(8) for _ in range(lag)]
        for number in range(12 - stop):
            rest.append(resumed.next(8))
            answer(resumed, rest[number])
        assert rest == whole[stop:]


def test_a_position_without_a_probe_or_of_another_model_is_refused():
    other = ProbedEstimate([""] * 3, half_life=5.0, size=4)
    mine = ProbedEstimate([""] * 3, half_life=5.0, size=5)
    with pytest.raises(ValueError, match="has a probe with other features"):
        mine.load_state_dict(other.state_dict())
    state = mine.state_dict()
    del state["probe"]
    with pytest.raises(ValueError, match=r"probe is set and the saved position has no probe"):
        mine.load_state_dict(state)
