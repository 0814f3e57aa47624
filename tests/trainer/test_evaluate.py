import itertools
import math

import pytest

from rloo.algorithm.rank_rollout import RewardScorer
from rloo.distributed import World
from rloo.rewards import RewardSet
from rloo.tracking.metrics import deviation, rollout_metrics, standard_error, window_mean
from rloo.trainer.evaluate import EvaluationSettings, evaluate, interval, pass_at_k
from rloo.types import Completion, Group, Prompt, Sampling
from support.models import CPU


class ScriptedEngine:
    """Gives prompt i, sample k the tokens of `script[i][k]`; greedy takes sample 0."""

    def __init__(self, script):
        self.script = script

    def sample(self, prompts, num_samples, sampling, noise):
        return [
            [
                Completion(list(ids), "stop", [0.0] * len(ids), [0.0] * len(ids))
                for ids in itertools.islice(self.script[prompt.id], num_samples)
            ]
            for prompt in prompts
        ]


class Words:
    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows]


def judge(reward) -> RewardScorer:
    return RewardScorer(RewardSet([reward]), Words(), World(CPU))


def test_evaluation_by_hand():
    # Right answers hold a 1. Prompt 0: 2 of 4 right, prompt 1: none, prompt 2: all.
    script = [[[1], [0, 0], [1], [0]], [[0]] * 4, [[1]] * 4]
    report, _ = evaluate(
        ScriptedEngine(script),
        [Prompt(i, [9], "p") for i in range(3)],
        judge(lambda completions: [float("1" in c) for c in completions]),
        EvaluationSettings(Sampling(4, (2,)), 4, noise=0, pass_threshold=1.0, pass_k=[1, 2, 4]),
    )
    assert report["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3)
    # Two of four, drawn twice: both wrong in 1 of 6 cases.
    assert report["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert report["pass@4"] == pytest.approx(2 / 3)
    assert report["pass@1_greedy"] == pytest.approx(2 / 3)
    assert report["reward"] == pytest.approx(0.5)
    assert report["completions/mean_length"] == pytest.approx(13 / 12)


def test_pass_at_k_equals_counting_all_draws():
    for passed in range(6):
        outcomes = [i < passed for i in range(5)]
        for k in range(1, 6):
            draws = list(itertools.combinations(outcomes, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(min(passed, 5), 5, k) == pytest.approx(expected)


def test_too_large_a_k_is_refused():
    with pytest.raises(ValueError, match="pass@8 needs 8 samples per prompt; there are 4"):
        evaluate(
            ScriptedEngine([]),
            [],
            judge(lambda completions: []),
            EvaluationSettings(Sampling(4, (2,)), 4, noise=0, pass_threshold=1.0, pass_k=[8]),
        )


def test_interval_is_wilsons_for_one_answer_a_prompt():
    # Newcombe 1998, table I, method 3: 81 of 263.
    low, high = interval([1.0] * 81 + [0.0] * 182)
    assert (low, high) == (pytest.approx(0.2553, abs=2e-4), pytest.approx(0.3662, abs=2e-4))
    assert interval([0.0] * 10) == [0.0, pytest.approx(0.2775, abs=1e-4)]
    assert interval([1.0] * 10) == [pytest.approx(0.7225, abs=1e-4), 1.0]


def test_interval_narrows_where_answers_of_a_prompt_agree_less():
    lone = interval([1.0, 0.0] * 50)
    averaged = interval([0.5, 0.4, 0.6, 0.5] * 25)
    assert averaged[1] - averaged[0] < 0.3 * (lone[1] - lone[0])


def completion(length, finish="stop"):
    return Completion([1] * length, finish, [0.0] * length, [0.0] * length)


def test_rollout_metrics_by_hand():
    groups = [
        Group(
            Prompt(0, [1], "a"),
            [completion(2), completion(4), completion(6, "length")],
            ["", "", ""],
            [1.0, 0.0, 0.5],
            {"f": [1.0, 0.0, None]},
        ),
        Group(
            Prompt(1, [1], "b"),
            [completion(1), completion(1), completion(1)],
            ["", "", ""],
            [1.0, 1.0, None],
            {"f": [2.0, 2.0, None]},
        ),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["reward"] == pytest.approx(0.7)
    assert metrics["reward_std"] == pytest.approx(deviation([1, 0, 0.5, 1, 1]))
    assert metrics["reward/standard_error"] == pytest.approx(deviation([0.5, 1.0]) / math.sqrt(2))
    assert metrics["reward/unscored"] == 1
    assert metrics["groups/signal"] == 0.5
    assert metrics["frac_reward_zero_std"] == 0.5
    # Baselines: 0.25, 0.75, 0.5 and 1, 1.
    assert metrics["baseline/variance"] == pytest.approx(deviation([0.25, 0.75, 0.5, 1, 1]) ** 2)
    assert metrics["completions/mean_length"] == 2.5
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 6)
    assert metrics["completions/max_terminated_length"] == 4
    assert metrics["rewards/f/mean"] == pytest.approx(5 / 4)


def test_means_over_a_window_leave_out_what_is_not_there():
    lines = [{"a": 1.0, "b": math.nan}, {"a": 3.0}, {"c": math.nan}]
    assert window_mean(lines) == {"a": 2.0}
    assert math.isnan(standard_error([[1.0]]))
