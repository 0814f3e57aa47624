"""The math reward: equivalence, missing references, and hostile texts that must not cost much."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from rloo.distributed.worker_process import WorkerDied
from rloo.rewards import RewardSet, make_math
from rloo.rewards.reward_workers import unavailable_reason


@pytest.fixture(scope="module")
def math_reward():
    reward = make_math(seconds=20.0)  # a busy machine must not make a right answer missing
    yield reward
    reward.close()


def test_equal_answers_are_right_and_others_wrong(math_reward):
    cases = [
        (r"so \boxed{42}", "42", 1.0),
        (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"so \boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"we get $\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        (r"\[ x = 42 \]", "42", 1.0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        ("The total is 1,234.", "1234", 1.0),
        (r"\boxed{7}", r"Because of this, \boxed{7}.", 1.0),
        (r"\boxed{41} \boxed{42}", "42", 1.0),
        ([{"role": "assistant", "content": "$42$"}], 42, 1.0),
        (r"so \boxed{41}", "42", 0.0),
        (r"42 is near \boxed{41}", "42", 0.0),
        (r"\boxed{42 or 41}", "42", 0.0),
        (r"\boxed{41, 42}", "42", 0.0),
        (r"\boxed{\pm 42}", "42", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("$42$" + " " * 1000, "42", 1.0),
        ("so 41", "42", 0.0),
        (r"\boxed{42}", None, None),
        (r"\boxed{42}", "", None),
    ]
    completions, answers, wanted = zip(*cases, strict=True)
    assert math_reward(completions, answer=answers) == list(wanted)
    assert math_reward([r"\boxed{2}"], solution=[r"$1+1=\boxed{2}$"]) == [1.0]


def test_it_works_in_a_thread_and_in_a_set(math_reward):
    rewards = RewardSet([math_reward])
    found = []

    def work():
        scores = rewards.score(["p"], [r"\boxed{4}"], [[1]], {"answer": ["4"]}, None)
        found.append(scores.by_function)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{"math_reward": [1.0]}]


def test_a_dataset_without_a_reference_is_refused_before_the_first_sample(math_reward):
    RewardSet([math_reward]).check(["solution"])
    message = "needs the reference in a column 'answer' or 'solution'"
    with pytest.raises(ValueError, match=f"{message}; the dataset has: level"):
        RewardSet([math_reward]).check(["level"])
    with pytest.raises(ValueError, match=message):
        math_reward(["1"])
    with pytest.raises(ValueError, match="the time of a call needs to be above 0"):
        make_math(seconds=0)


@pytest.mark.slow
def test_long_and_deep_texts_are_wrong_and_not_judged(math_reward, monkeypatch):
    hostile = [
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        r"\boxed{" + "(" * 400 + r"\sqrt{2}" + ")" * 400 + "}",
        r"\boxed{" + "{" * 3000,
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{" * 100_000,
        r"\boxed{" + r"\frac{1}{" * 60 + "2" + "}" * 60 + "}",
        "$" * 1_000_000,
        "7" * 1_000_000,
        r"\boxed{9^{9^{9^{9}}}}",
    ]
    monkeypatch.setattr(math_reward, "_judge", lambda pairs: pairs and pytest.fail("judged"))
    for reference in ("42", r"2\sqrt{2}", "x+1"):
        assert math_reward(hostile, answer=[reference] * len(hostile)) == [0.0] * len(hostile)


@pytest.mark.slow
def test_the_time_to_start_is_that_of_the_processor(tmp_path, monkeypatch):
    """A library that works for ever is ended; one that waits (here 10 times as long) is not."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rloo.addons.graders.math.math_reward._START_PROCESSOR", 0.2)
    for body, status in (
        ("while True:\n    pass\n", -signal.SIGPROF),
        ("import time\ntime.sleep(2)\nraise SystemExit(7)\n", 7),
    ):
        (tmp_path / "math_verify.py").write_text(body)
        (tmp_path / "sympy.py").write_text("")
        with pytest.raises(RuntimeError, match=r"did not start: .* 0.2 s of the proc") as caught:
            make_math.__globals__["_start_worker"]()
        assert isinstance(caught.value.__cause__, WorkerDied)
        assert caught.value.__cause__.status == status


@pytest.mark.slow
def test_after_an_interrupt_no_verdict_is_taken_for_the_next_one(math_reward, monkeypatch):
    reward = math_reward
    first, second = r"\boxed{x \cdot 2}", r"\boxed{3x}"
    assert reward([first], answer=["2x"]) == [1.0]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("rloo.addons.graders.math.math_reward.wait_result", interrupt)
        reward([first], answer=["2x"])
    assert reward([second, first], answer=["2x", "2x"]) == [0.0, 1.0]


# Their references have such operations, so that their form says nothing against them.
BOMBS = [
    (r"9^{9^{9^{9}}}", "2^{3^{4}}"),
    (r"(((9999!)!)!)!", "(3!)!"),
    (r"(x+1)^{99999}", "x^{2}+1"),
    (r"10^{10^{10}}", "2^{3^{4}}"),
]


@pytest.mark.slow
def test_many_bombs_take_one_budget_and_score_nothing(math_reward, monkeypatch):
    monkeypatch.setattr(math_reward, "_seconds", 0.5)
    texts = [rf"\boxed{{{bomb}+{n}}}" for n in range(3) for bomb, _ in BOMBS]
    answers = [f"{reference}+{n}" for n in range(3) for _, reference in BOMBS]
    answers, logged = [*answers, "2x"], {}
    started = time.monotonic()
    rewards = math_reward(
        [*texts, r"\boxed{x \cdot 2}"], answer=answers, log_metric=logged.__setitem__
    )
    # 1.8 s is the budget; a busy machine may leave some of them missing.
    assert time.monotonic() - started < 30
    assert 1.0 not in rewards[:-1] and 0.0 in rewards
    assert rewards[-1] in (1.0, None)
    assert logged["rewards/math_reward/unjudged"] == rewards.count(None) / len(rewards)


@pytest.mark.slow
def test_a_judge_or_worker_that_is_stopped_is_missing_once_and_replaced(math_reward, monkeypatch):
    def stop_judges(process):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            os.kill(int(child), signal.SIGSTOP)

    for stop in (stop_judges, lambda process: os.kill(process, signal.SIGSTOP)):
        assert math_reward([r"\boxed{2x}"], answer=["3x-x"]) == [1.0]
        stop(math_reward._pool.pids[0])
        with monkeypatch.context() as patch:
            patch.setattr(math_reward, "_seconds", 0.1)
            patch.setattr("rloo.addons.graders.math.math_reward._REPLY_SECONDS", 0.3)
            assert math_reward([r"\boxed{x \cdot 2}"], answer=["2x"]) == [None]
        assert math_reward([r"\boxed{x \cdot 2}"], answer=["2x"]) == [1.0]


def test_a_reference_that_is_too_hard_or_unreadable_is_no_fault_of_the_answer(math_reward):
    references = ["9^{9^{9^{9}}}x", "x +* y", "(", "9" * 2000]
    assert math_reward([r"\boxed{7x}"] * 4, answer=references) == [None] * 4


def test_it_is_sent_to_another_process_by_its_name():
    assert unavailable_reason(RewardSet([make_math()], sources=["math"])) is None
    assert "is an object" in unavailable_reason(RewardSet([make_math()]))
