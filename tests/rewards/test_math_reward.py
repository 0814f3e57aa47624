"""The math reward: equivalence, missing references, and hostile texts that must not cost much."""

import threading

import pytest

from rloo.rewards import RewardSet, make_math


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
        ("$42$" + " " * 1000, "42", 0.0),
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
    with pytest.raises(ValueError, match="a deadline needs to be above 0"):
        make_math(seconds=0)


def test_long_and_deep_texts_are_wrong_and_little_of_them_is_judged(math_reward, monkeypatch):
    """None were a text that took longer than its deadline."""
    hostile = [
        r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
        r"\boxed{" + "{" * 3000,
        r"\boxed{" + "9" * 100_000 + "}",
        r"\boxed{" * 100_000,
        "$" * 1_000_000,
        "7" * 1_000_000,
    ]
    judged, ask = [], math_reward._ask
    monkeypatch.setattr(math_reward, "_ask", lambda line: judged.append(len(line)) or ask(line))
    assert math_reward(hostile, answer=["42"] * len(hostile)) == [0.0] * len(hostile)
    assert len(judged) <= 3 and max(judged) < 3000


def test_after_an_interrupt_no_verdict_is_taken_for_the_next_one(monkeypatch):
    reward = make_math(seconds=20.0)
    assert reward([r"\boxed{1}"], answer=["1"]) == [1.0]

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(reward._process.stdout, "readline", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reward([r"\boxed{1}"], answer=["1"])
    assert reward([r"\boxed{2}", r"\boxed{1}"], answer=["1", "1"]) == [0.0, 1.0]
    reward.close()


@pytest.mark.slow
def test_what_cannot_be_computed_in_time_is_missing_and_the_worker_comes_back(monkeypatch):
    bombs = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{9^{9^{9^9}}+1}",
        r"$10^{10^{10}}$",
        r"\boxed{(((99999!)!)!)!}",
        r"\boxed{" + "(" * 450 + "1" + ")" * 450 + "}",
        r"\boxed{" + r"\frac{1}{" * 100 + "1" + "}" * 100 + "}",
        r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^2}}",
    ]
    reward = make_math(seconds=1.0)
    started, start = [], reward._start
    monkeypatch.setattr(reward, "_start", lambda: started.append(1) or start())
    missing = 0
    fine = r"\boxed{42}"
    for bomb in bombs:
        first, second = reward([bomb, fine], answer=["42", "42"])
        missing += first is None
        assert first in (None, 0.0), bomb
        assert second == 1.0, bomb
        assert len(started) == 1 + missing, bomb
    assert missing > 2
    assert reward([bombs[0]], answer=["42"]) == [None]
    reward.close()
