"""The built-in rewards on completions whose score is known by hand, and how a spec finds them."""

import re

import pytest

from rloo.rewards import (
    RewardSet,
    gsm8k_reward,
    load_reward,
    make_exact_match,
    make_format,
    make_length,
    make_repetition,
    make_soft_overlong,
    tag_count_reward,
    text_of,
)


def test_the_text_is_the_string_or_the_last_assistant_message():
    assert text_of("plain") == "plain"
    turns = [
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "tool", "content": "third"},
    ]
    assert text_of(turns) == "second"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert text_of([{"role": "assistant", "content": parts}]) == "ab"
    assert text_of([{"role": "assistant", "content": None, "tool_calls": []}]) == ""
    assert text_of([{"role": "user", "content": "question"}]) == ""
    assert text_of([]) == ""


def test_exact_match_compares_with_the_answer():
    completions = [" Paris\n", "paris", "7", "x", [{"role": "assistant", "content": "Paris"}]]
    answers = ["Paris", "Paris", 7, None, "Paris "]
    assert make_exact_match()(completions, answers) == [1.0, 0.0, 1.0, None, 1.0]
    assert make_exact_match(casefold=True)(completions, answers) == [1.0, 1.0, 1.0, None, 1.0]
    assert make_exact_match(strip=False)(completions, answers) == [0.0, 0.0, 1.0, None, 0.0]


def test_the_default_format_is_one_thought_and_one_answer():
    right = [
        "<think>a\nb</think><answer>7</answer>",
        "\n<think>a</think>\n\n<answer>1 < 2</answer>\n",
        [{"role": "assistant", "content": "<think>a</think><answer>b</answer>"}],
    ]
    assert make_format()(right) == [1.0, 1.0, 1.0]
    wrong = [
        "",
        "<answer>7</answer>",
        "<think>a</think><answer>7</answer> and more",
        "<think>a</think><answer>7</answer><answer>8</answer>",
        "<think>a<think>b</think></think><answer>7</answer>",
        "<think>a</think>so<answer>7</answer>",
        "<think>a</think><answer>7",
        "<think></think><answer>7</answer>",
        "<think>a</think><answer> \n\u200b</answer>",
    ]
    assert make_format()(wrong) == [0.0] * len(wrong)


def test_a_format_must_match_the_whole_completion_and_fit_the_cap():
    assert make_format(pattern=r"\d+")(["12", "12 ", "a12"]) == [1.0, 0.0, 0.0]
    assert make_format(pattern="a.*", max_characters=3)(["a\nb", "abcd"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"pattern '\(' is not a regular expression"):
        make_format(pattern="(")


def test_the_default_format_reads_hostile_text_in_linear_time():
    """Texts so long that a quadratic reading would run into the time limit of the tests."""
    pieces = ["<think>", "</think><answer>", "<think>a</think><answer>b</answer>", " ", "<"]
    texts = ["<think>a</think>" + piece * (1_000_000 // len(piece)) for piece in pieces]
    assert make_format(max_characters=2_000_000)(texts) == [0.0] * len(texts)


def test_length_is_1_in_the_band_and_falls_linearly_outside():
    ids = [[0] * length for length in (0, 5, 10, 15, 20, 25, 30, 40, 100)]
    length = make_length(target_min=10, target_max=20)
    assert length(ids) == [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert make_length(target_max=4)([[], [1, 2, 3, 4, 5]]) == [1.0, 0.75]
    for bad in ({"target_min": 5, "target_max": 4}, {"target_max": 0}, {"target_max": -1}):
        with pytest.raises(ValueError, match="0 <= target_min <= target_max"):
            make_length(**bad)


def test_soft_overlong_is_0_then_falls_linearly_to_minus_1():
    ids = [[0] * length for length in (0, 60, 80, 90, 100, 101, 500)]
    overlong = make_soft_overlong(max_tokens=100, cache_tokens=20)
    assert overlong(ids) == [0.0, 0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    with pytest.raises(ValueError, match="0 < cache_tokens <= max_tokens"):
        make_soft_overlong(max_tokens=10, cache_tokens=11)


def test_repetition_is_minus_the_share_of_repeated_ngrams():
    ids = [[1, 2, 3, 4], [1, 1, 1, 1, 1], [1, 2, 1, 2, 1], [1, 2], []]
    # 3-grams: 2 of 2 distinct; 1 of 3; 121, 212, 121: 2 of 3; none; none.
    texts = [""] * len(ids)
    rewards = make_repetition()(texts, ids)
    assert rewards == pytest.approx([0.0, -2 / 3, -1 / 3, 0.0, 0.0], abs=1e-12)
    assert make_repetition(ngram=1, max_penalty=0.5)([""], [[7, 7, 7, 8]]) == [-0.25]
    words = ["A b\na B  a", "a b", "", [{"role": "assistant", "content": "no no no no"}]]
    # ab, ba, ab, ba: 2 of 4; one; none; 1 of 3.
    rewards = make_repetition(ngram=2, words=True)(words, [[]] * 4)
    assert rewards == pytest.approx([-0.5, 0.0, 0.0, -2 / 3], abs=1e-12)
    with pytest.raises(ValueError, match="ngram is 0"):
        make_repetition(ngram=0)


def test_tag_count_is_a_quarter_for_each_tag_that_is_there_once():
    whole = "<think>\nsum\n</think>\n<answer>\n4\n</answer>"
    texts = [whole, whole + whole, "<think>\n4", "<think>4</think><answer>4</answer>", ""]
    texts += [whole.replace("</think>\n", "</think>"), [{"role": "assistant", "content": whole}]]
    assert tag_count_reward(texts) == [1.0, 0.0, 0.25, 0.0, 0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("gsm8k", "gsm8k_reward"),
        ("gsm8k_format", "gsm8k_format_reward"),
        ("countdown", "countdown_reward"),
        ("exact_match", "exact_match_reward"),
        ("format", "format_reward"),
        ("length(target_max=50)", "length_reward"),
        ("math", "math_reward"),
        ("repetition", "repetition_reward"),
        ("tag_count", "tag_count_reward"),
        ("soft_overlong(max_tokens=9, cache_tokens=3)", "soft_overlong_reward"),
        ("rloo.addons.graders.math.gsm8k:gsm8k_reward", "gsm8k_reward"),
    ],
)
def test_every_built_in_is_found_by_name(spec, name):
    assert RewardSet([load_reward(spec)]).names == [name]


def test_options_come_from_a_call_or_a_mapping():
    ids = [[0] * 5, [0] * 25]
    spec = "length(target_min=10, target_max=20)"
    mapping = {"name": "length", "target_min": 10, "target_max": 20}
    assert load_reward(spec)(ids) == load_reward(mapping)(ids) == [0.5, 0.75]
    assert load_reward("format(pattern='a:(b|c)')")(["a:c", "a:d"]) == [1.0, 0.0]
    assert load_reward(gsm8k_reward) is gsm8k_reward


def test_a_function_of_a_file_is_loaded_once_and_can_define_dataclasses(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass(slots=True)\n"
        "class Seen:\n"
        "    count: int = 0\n"
        "SEEN = Seen()\n"
        "def first(completions):\n"
        "    SEEN.count += 1\n"
        "    return [SEEN.count] * len(completions)\n"
        "def second(completions):\n"
        "    return first(completions)\n"
    )
    first, second = load_reward(f"{file}:first"), load_reward(f"{file}:second")
    assert (first(["a"]), second(["a"])) == ([1], [2])
    with pytest.raises(ValueError, match="has no function 'frist'; did you mean 'first'"):
        load_reward(f"{file}:frist")
    with pytest.raises(ValueError, match=r"'SEEN' of .* is not a function but Seen"):
        load_reward(f"{file}:SEEN")


def test_an_error_inside_the_users_file_is_passed_on(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    for _ in range(2):  # a half-imported module must not be found the second time
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            load_reward(f"{tmp_path / 'broken.py'}:reward")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lenght", "unknown reward 'lenght'; did you mean 'length'?"),
        ("zzz", "unknown reward 'zzz' (built in: code, countdown, exact_match, format, "),
        ("length", "missing 1 required keyword-only argument: 'target_max'"),
        ("length(target_max=5, max=3)", "(options: target_min, target_max)"),
        ("length(target_max='5')", "do not fit the reward 'length'"),
        ("length(5)", "options are given by name"),
        ("length(**{'target_max': 5})", "options are given by name"),
        ("length(target_max=open('x'))", "cannot read the reward"),
        ("length(target_max=)", "cannot read the reward"),
        ("gsm8k(x=1)", "the reward 'gsm8k' takes no options, but got x"),
        ({"target_max": 5}, "has no name"),
        (3, "3 is neither a name nor a function, nor a reward model, nor an object with get_"),
        ("no_such_file.py:reward", "no_such_file.py (rewards are given as file.py:function)"),
        ("reward.py", "names no function; write reward.py:function"),
        ("no_such_module:reward", "there is no module 'no_such_module'"),
        ("rloo.no_such_module:reward", "there is no module 'rloo.no_such_module'"),
        (":reward", "is no module name"),
        ("rloo.addons.graders.math.gsm8k:gsm8k_rewrad", "did you mean 'gsm8k_reward'?"),
        ("rloo.rewards:", "rloo.rewards has no function ''"),
    ],
)
def test_a_bad_spec_is_an_error_that_says_what_is_wrong(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_reward(spec)
