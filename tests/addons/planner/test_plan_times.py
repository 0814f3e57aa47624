"""The times of `rloo plan`: of engines and updates whose costs are known, by a clock of our own."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rloo.addons.planner import update_timing
from rloo.addons.planner.rollout_timing import RolloutTimer, made_up, share_alive
from rloo.addons.planner.stopwatch import Stopwatch
from rloo.addons.planner.time_estimate import RunTimes, StepTimes, _draw
from rloo.addons.planner.update_timing import MeasuredStep, UpdateTimer, unsampled
from rloo.config.batch_sizes import batches_of
from rloo.config.config import RLOOConfig
from rloo.trainer.build import make_state
from rloo.trainer.schedule import count_evaluations_and_saves, unused_intervals, writing_seconds
from rloo.types import Completion, EngineCapabilities, Sampling

CPU = torch.device("cpu")
PROMPT, STEP, ROW, CONTEXT = 0.002, 0.05, 0.003, 0.00001


class Clock:
    """Seconds that pass where `spend` says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.longest = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds
        self.longest = max(self.longest, seconds)


class KnownEngine:
    """Spends what the formula above says, row by row and step by step, and `squared` for the square
    of each context. Completion k of a prompt ends after `lengths[k]` tokens, where tokens may end
    one."""

    def __init__(
        self, clock, lengths=(), *, wave=None, keeps_finished=False, slower=1.0, squared=0.0
    ):
        self.clock, self.lengths, self.wave, self.slower = clock, lengths, wave, slower
        self.squared = squared
        cache = {"row_bytes": 1, "cache_bytes": wave} if wave else {}
        self.capabilities = EngineCapabilities(
            "known",
            copies_weights=False,
            shares_memory=True,
            exact_noise=True,
            filters=True,
            keeps_finished=keeps_finished,
            **cache,
        )

    def sample(self, prompts, samples, sampling, noise):
        groups = []
        for _ in prompts:
            ends = [sampling.max_tokens] * samples
            if sampling.stop_token_ids:
                ends = [min(self.lengths[k % len(self.lengths)], e) for k, e in enumerate(ends)]
            groups.append(ends)
        rows = [(len(p.token_ids), end) for p, e in zip(prompts, groups, strict=True) for end in e]
        wave = self.wave or len(rows)
        for start in range(0, len(rows), wave):
            self._compute(rows[start : start + wave], samples)
        return [[self._completion(n, sampling) for n in ends] for ends in groups]

    def _compute(self, rows, size):
        seconds = PROMPT * sum(length for length, _ in rows[::size])
        for position in range(1, max(end for _, end in rows)):
            alive = [length for length, end in rows if end > position]
            alive = [length for length, _ in rows] if self.capabilities.keeps_finished else alive
            contexts = sum(length + position for length in alive)
            seconds += STEP + ROW * len(alive) + CONTEXT * contexts
            seconds += self.squared * sum((length + position) ** 2 for length in alive)
        self.clock.spend(self.slower * seconds)

    def _completion(self, length, sampling):
        whole = length == sampling.max_tokens and self.lengths[:1] != (length,)
        finish = "length" if whole or not sampling.stop_token_ids else "stop"
        return Completion([1] * length, finish, [0.0] * length, [0.0] * length)


def known(lengths=(), limit=60.0, **options):
    clock = Clock()
    engine = KnownEngine(clock, lengths, **options)
    return RolloutTimer(engine, Stopwatch(limit, CPU, clock), 0), clock


def sampling(max_tokens):
    return Sampling(max_tokens, (0,))


def test_the_worst_case_is_the_sum_over_all_positions_of_a_rollout_that_is_too_long_to_measure():
    cost, clock = known()
    prompts, how = made_up(32, 50), sampling(2000)
    cost.calibrate(prompts, 8, how)
    before = clock.now
    # 1999 steps of 256 rows; contexts 51, 52, ..., 2049.
    contexts = 256 * 1999 * (51 + 2049) / 2
    by_hand = PROMPT * 32 * 50 + 1999 * STEP + 1999 * 256 * ROW + CONTEXT * contexts
    assert by_hand > 20 * 60
    assert cost.worst(prompts, 8, how) == pytest.approx(by_hand, rel=1e-9)
    assert clock.now == before


def test_rows_that_do_not_fit_at_once_are_sampled_in_waves():
    cost, _ = known(wave=64)
    prompts, how = made_up(20, 50), sampling(2000)
    cost.calibrate(prompts, 8, how)
    # 160 rows: 64, 64 and 32.
    contexts = 160 * 1999 * (51 + 2049) / 2
    by_hand = PROMPT * 20 * 50 + 3 * 1999 * STEP + 1999 * 160 * ROW + CONTEXT * contexts
    assert cost.worst(prompts, 8, how) == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("keeps_finished", [False, True])
def test_an_expected_rollout_is_the_sum_over_its_unfinished_completions(keeps_finished):
    # Half of the completions end after 10 tokens and half after 40: steps 1 to 9 have all rows,
    # steps 10 to 39 half of them, where the engine drops what has ended.
    cost, _ = known((10, 40), keeps_finished=keeps_finished)
    prompts, how = made_up(400, 50), sampling(2000)
    cost.calibrate(prompts, 4, how)
    drawn = cost.expected(prompts, 4, how)
    later = 1600 if keeps_finished else 800
    contexts = 1600 * sum(range(51, 60)) + later * sum(range(60, 90))
    by_hand = PROMPT * 400 * 50 + 39 * STEP + ROW * (9 * 1600 + 30 * later) + CONTEXT * contexts
    assert drawn.completions is None, "it would have taken more than its share of a minute"
    assert drawn.seconds == pytest.approx(by_hand, rel=1e-6)
    assert drawn.mean_length == pytest.approx(25)


def test_a_rollout_that_is_short_is_measured_whole():
    cost, _ = known((3, 7))
    prompts, how = made_up(4, 20), sampling(2000)
    cost.calibrate(prompts, 2, how)
    drawn = cost.expected(prompts, 2, how)
    assert [len(c.token_ids) for c in chain(*drawn.completions)] == 4 * [3, 7]
    contexts = 8 * (21 + 22) + 4 * (23 + 24 + 25 + 26)
    by_hand = PROMPT * 80 + 6 * STEP + ROW * (2 * 8 + 4 * 4) + CONTEXT * contexts
    assert drawn.seconds == pytest.approx(by_hand)


def test_a_rollout_that_was_measured_whole_tells_how_long_the_next_one_may_be():
    cost, clock = known((3, 7))
    prompts, how = made_up(4, 20), sampling(2000)
    cost.calibrate(prompts, 2, how)
    first = cost.expected(prompts, 2, how)
    before = clock.now
    again = cost.expected(prompts, 2, how)
    assert again.seconds == pytest.approx(first.seconds)
    assert clock.now - before == pytest.approx(again.seconds), "nothing was tried before"


def test_a_worst_case_that_was_measured_whole_tells_what_another_takes():
    squared = 1e-7
    cost, clock = known((3, 7), limit=1000.0, squared=squared)
    prompts, how = made_up(4, 20), sampling(400)
    cost.calibrate(prompts, 2, how)
    cost.expected(prompts, 2, how)

    def by_hand(rows, groups):
        contexts, squares = sum(range(21, 420)), sum(n * n for n in range(21, 420))
        steps = 399 * (STEP + rows * ROW) + rows * (CONTEXT * contexts + squared * squares)
        return PROMPT * 20 * groups + steps

    assert cost.worst(prompts, 2, how) == pytest.approx(by_hand(8, 4))
    cost.watch = Stopwatch(0.0, CPU, clock)
    before = clock.now
    assert cost.worst(prompts[:2], 4, how) == pytest.approx(by_hand(8, 2), rel=0.01)
    assert cost.worst(prompts[:3], 2, how) == pytest.approx(by_hand(6, 3), rel=0.1)
    assert clock.now == before


def test_rollouts_are_measured_as_long_as_another_fits_into_half_of_the_time_that_is_left():
    cost, clock = known((3, 7))
    prompts, how = made_up(4, 20), sampling(2000)
    cost.calibrate(prompts, 2, how)
    source = SimpleNamespace(next=lambda groups: prompts[:groups])
    for times, number in ((2.0, 1), (3.5, 2), (4.5, 3), (60, 4)):
        seconds = cost.expected(prompts, 2, how).seconds
        cost.watch = Stopwatch(times * seconds, CPU, clock)
        chosen, drawn = _draw(cost, source, 4, 2, how)
        assert len(chosen) == len(drawn) == number
        cost.watch = Stopwatch(60.0, CPU, clock)


@pytest.mark.parametrize("slower", [0.001, 0.1, 1, 10, 100])
@pytest.mark.parametrize("max_tokens", [1, 2, 64, 4000])
def test_a_slow_engine_does_not_make_the_measurement_longer_than_its_limit(slower, max_tokens):
    cost, clock = known((30, 90), slower=slower)
    prompts, how = made_up(64, 100), sampling(max_tokens)
    cost.calibrate(prompts, 16, how)
    cost.expected(prompts, 16, how)
    cost.worst(prompts, 16, how)
    # The least that can be measured: one prompt and few tokens of one completion, begun twice.
    least = 3 * slower * (PROMPT * 100 + 4 * (STEP + ROW + CONTEXT * 105))
    assert clock.now - 100 < max(60, least)


def test_completions_that_have_not_ended_go_on_ending_at_the_same_rate():
    def drawn(length, finish):
        return Completion([1] * length, finish, [0.0] * length, [0.0] * length)

    some = [[drawn(2, "stop"), drawn(4, "length")], [drawn(4, "length"), drawn(4, "length")]]
    # Of 14 tokens one was an end: after 4 positions 3 of 4 are left, then 13/14 of those.
    expected = [1, 3 / 4, 3 / 4, 3 / 4, 3 / 4 * 13 / 14, 3 / 4 * (13 / 14) ** 2]
    assert share_alive(some, 4, 7) == pytest.approx(expected)
    assert share_alive(some, 4, 4) == pytest.approx(expected[:3])


def test_made_up_completions_have_the_lengths_that_are_expected():
    alive = np.array([1.0, 0.5, 0.5, 0.25])
    made = list(chain(*unsampled(2, 4, alive)))
    lengths = sorted(len(c.token_ids) for c in made)
    assert lengths == [2, 2, 2, 2, 4, 4, 5, 5]
    assert {c.finish for c in made if len(c.token_ids) == 5} == {"length"}


class KnownSteps:
    """`UpdateTimer` where a step of n completions of 10 tokens takes `cost(n)` seconds for its
    credit, as many for its update, and half a second for the optimizer."""

    def __init__(self, monkeypatch, cost):
        self.clock, self.sizes = Clock(), []

        def learn(policy, terms, samples, *, too_large, watch):
            self.sizes.append(len(samples))
            seconds = cost(len(samples))
            self.clock.spend(2 * seconds + 0.5)
            return MeasuredStep(10 * len(samples), seconds, seconds, 0.5, True)

        monkeypatch.setattr(update_timing, "_learn", learn)
        monkeypatch.setattr(update_timing, "exceeds", lambda *_, **__: False)
        monkeypatch.setattr(update_timing, "count_tokens", lambda policy, some: 10 * len(some))
        policy = SimpleNamespace(max_tokens=100, packed=True)
        parts = SimpleNamespace(policy=policy, batches=SimpleNamespace(num_iterations=2))
        self.cost = UpdateTimer(parts, SimpleNamespace(loss_context=lambda _: None))

    def measure(self, number, seconds):
        watch = Stopwatch(seconds, CPU, self.clock)
        began, samples = self.clock.now, range(number)
        found = self.cost.measure(samples, watch)
        return self.cost.of(10.0 * number, found), self.clock.now - began


def test_learning_from_few_samples_tells_what_all_take(monkeypatch):
    steps = KnownSteps(monkeypatch, lambda n: 0.1 + 0.05 * n)
    found, spent = steps.measure(64, 6.0)
    assert max(steps.sizes) < 64 and spent < 8
    assert found.update == pytest.approx(0.1 + 0.05 * 64)
    assert found.credit == pytest.approx((0.1 + 0.05 * 64) / 2)  # of two steps
    assert found.optimizer == 0.5
    # Of others that do not fit it is known from the first ones.
    more, spent = steps.measure(640, 0.1)
    assert spent == 0 and more.update == pytest.approx(0.1 + 0.05 * 640)


def test_a_short_step_is_measured_whole_and_twice(monkeypatch):
    steps = KnownSteps(monkeypatch, lambda n: 0.01 * n + (1 if len(steps.sizes) == 1 else 0))
    found, _ = steps.measure(64, 100.0)
    assert steps.sizes[-2:] == [64, 64], "the first time allocates"
    assert steps.sizes.count(64) == 4, "and of three others it is the median"
    assert found.update == pytest.approx(0.64)


@pytest.mark.parametrize(
    "options, evaluations, checkpoints",
    [
        ({"eval_on_start": True}, 2, 0),
        ({"eval_strategy": "steps", "eval_steps": 4}, 3, 0),  # 4, 8, 10
        ({"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}, 3, 0),
        ({"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 5}, 2, 0),
        ({"save_strategy": "steps", "save_steps": 3}, 0, 4),  # 3, 6, 9, 10
        ({"save_strategy": "steps", "save_steps": 0.5}, 0, 2),
        # 12 prompts, 4 a step: an epoch is 3 steps.
        ({"save_strategy": "epoch", "eval_strategy": "epoch"}, 4, 4),
        # Within a rollout of 4 steps nothing is saved: steps 4, 8, 10.
        ({"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}, 0, 3),
        ({}, 0, 0),
    ],
    ids=str,
)
def test_evaluations_and_checkpoints_are_counted(options, evaluations, checkpoints):
    given = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
    config = RLOOConfig(
        "run", max_steps=10, num_prompts=4, num_generations=2, **{**given, **options}
    )
    batches = batches_of(config, 1)
    state = make_state(None, config, batches)
    assert count_evaluations_and_saves(config, state, batches, 12) == (evaluations, checkpoints)
    assert state.global_step == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"save_strategy": "no", "save_steps": 2}, ["save_steps is 2 "]),
        ({"save_strategy": "epoch", "eval_steps": 0.5}, ["eval_steps is 0.5 "]),
        ({"save_strategy": "steps", "save_steps": 2}, []),
        ({"save_strategy": "no", "logging_steps": 3}, []),
    ],
    ids=str,
)
def test_an_interval_without_its_strategy_is_noted(options, named):
    notes = unused_intervals(RLOOConfig("run", report_to="none", **options))
    assert [note[: len(start)] for note, start in zip(notes, named, strict=True)] == named


def test_the_end_is_steps_evaluations_and_writing_away():
    expected, worst = StepTimes(1, 2, 3, 4, evaluation=50), StepTimes(0, 5, 0, 4, evaluation=70)
    times = RunTimes(
        steps=7, expected=expected, worst=worst.at_least(expected), expected_length=1,
        whole_groups=True, evaluations=2, checkpoints=3, checkpoint=0.5, result=0.25, start=20,
    )  # fmt: skip
    assert times.to_the_end(times.expected) == 7 * 10 + 2 * 50 + 3 * 0.5 + 0.25 + 20
    assert times.to_the_end(times.worst) == 7 * 13 + 2 * 70 + 3 * 0.5 + 0.25 + 20


def test_what_is_tried_on_a_disk_leaves_no_file(tmp_path):
    assert writing_seconds(tmp_path / "not" / "there", 1000) > 0
    assert writing_seconds(tmp_path, 0) == 0
    assert list(tmp_path.iterdir()) == []
