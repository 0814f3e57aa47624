"""The GSM8K reward on 200 real references: right, wrong and disguised answers, counted exactly."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from rloo.addons.graders.math.numbers import read_numeral
from rloo.rewards import gsm8k_format_reward, gsm8k_reward

ROWS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "gsm8k_200.jsonl").read_text().splitlines()
]
ANSWERS = [row["answer"] for row in ROWS]
# An independent reading: in these rows every reference is a plain integer, one has a comma.
VALUES = [int(answer.split("#### ")[1].replace(",", "")) for answer in ANSWERS]


def count_right(make_completion):
    completions = [
        make_completion(row["answer"], value) for row, value in zip(ROWS, VALUES, strict=True)
    ]
    rewards = gsm8k_reward(completions, ANSWERS)
    assert set(rewards) <= {0.0, 1.0}
    return sum(rewards)


def swap_digits(value):
    """Two neighbouring digits exchanged (100 becomes 10); one more where all digits are equal."""
    digits = str(value)
    for i in range(len(digits) - 1):
        if digits[i] != digits[i + 1]:
            return int(digits[:i] + digits[i + 1] + digits[i] + digits[i + 2 :])
    return value + 1


RIGHT = {
    "the reference itself": lambda answer, v: answer,
    "after the mark": lambda answer, v: f"Some work.\n#### {v}",
    "after the last of two marks": lambda answer, v: f"#### {v + 1}\nNo, wait.\n#### {v}",
    "unit after the mark": lambda answer, v: f"#### {v} eggs per day.",
    "currency": lambda answer, v: f"#### ${v}",
    "escaped currency": lambda answer, v: rf"#### \${v}",
    "latex": lambda answer, v: f"#### ${v}$",
    "bold": lambda answer, v: f"#### **{v}**",
    "unit without a space": lambda answer, v: f"#### {v}kg",
    "square unit": lambda answer, v: f"#### {v} m²",
    "thousands": lambda answer, v: f"#### {v:,}",
    "latex thousands": lambda answer, v: "#### " + f"{v:,}".replace(",", "{,}"),
    "trailing zeros": lambda answer, v: f"#### {v}.00",
    "currency, thousands, zeros, period": lambda answer, v: f"#### ${v:,}.00.",
    "fraction": lambda answer, v: f"#### {2 * v}/2",
    "latex fraction": lambda answer, v: rf"#### \frac{{{3 * v}}}{{3}}",
    "box after the mark": lambda answer, v: rf"#### \boxed{{{v}}}",
    "equation": lambda answer, v: f"#### x = {v}",
    "next line": lambda answer, v: f"####\n{v}\n",
    "box": lambda answer, v: rf"Add 2 and 3. So \boxed{{{v}}}, as 5 > 4.",
    "last box": lambda answer, v: rf"\boxed{{{v + 1}}} was wrong: \boxed{{{v}}}",
    "box with braces": lambda answer, v: rf"\boxed{{\text{{total}} = {v}}}",
    "answer is": lambda answer, v: f"The answer is {v}. I checked 3 times.",
    "answer is, colon, bold": lambda answer, v: f"So the final Answer is: **${v:,}**\nDone in 2.",
    "last number": lambda answer, v: f"First 2 + 3 = 5. Then we get {v} eggs.",
    "last number, dollars": lambda answer, v: f"2 + 3 = 5, so she pays ${v:,}.",
    "messages": lambda answer, v: [{"role": "assistant", "content": f"#### {v}"}],
    "message parts": lambda answer, v: [
        {"role": "assistant", "content": [{"type": "text", "text": f"#### {v}"}]},
        {"role": "tool", "content": "#### 0.5"},
    ],
}

WRONG = {
    "one more": lambda answer, v: f"#### {v + 1}",
    "one less": lambda answer, v: f"#### {v - 1}",
    "digits swapped": lambda answer, v: f"#### {swap_digits(v)}",
    "a digit appended": lambda answer, v: f"#### {v}7",
    "a digit in front": lambda answer, v: f"#### 7{v}",
    "a little more": lambda answer, v: f"#### {v}.01",
    "a half": lambda answer, v: f"#### {2 * v + 1}/2",
    "boxed": lambda answer, v: rf"\boxed{{{v + 1}}}",
    "answer is": lambda answer, v: f"the answer is {v + 1}",
    "last number": lambda answer, v: f"so it is {v + 1}",
}

DISGUISED = {
    "right before, wrong at the mark": lambda answer, v: f"It is {v}.\n#### {v + 1}",
    "right box, wrong at the mark": lambda answer, v: rf"\boxed{{{v}}} #### {v + 1}",
    "right first, wrong last mark": lambda answer, v: f"#### {v}\n#### {v + 1}",
    "or": lambda answer, v: f"#### {v} or {v + 1}",
    "or, wrong first": lambda answer, v: f"#### {v + 1} or {v}",
    "list": lambda answer, v: f"#### {v + 1}, {v}",
    "list without spaces": lambda answer, v: f"#### {v + 1},{v:05d},1",
    "list over lines": lambda answer, v: f"#### {v}\n{v + 1}\n{v + 2}",
    "the number twice": lambda answer, v: f"#### {v} {v}",
    "range": lambda answer, v: f"#### {v}-{v + 1}",
    "interval": lambda answer, v: f"#### [{v}, {v}]",
    "sum": lambda answer, v: f"#### {v}+0",
    "product": lambda answer, v: f"#### {v}*1",
    "power": lambda answer, v: f"#### {v}^1",
    "superscript": lambda answer, v: f"#### {v}²",
    "exponent": lambda answer, v: f"#### {v}e0",
    "two dots": lambda answer, v: f"#### {v}.0.0",
    "version": lambda answer, v: f"#### x{v}",
    "date": lambda answer, v: f"#### {v}/1/1",
    "bad thousands": lambda answer, v: f"#### {v},00",
    "percent": lambda answer, v: f"#### {v}%",
    "degree": lambda answer, v: f"#### {v}°",
    "not equal": lambda answer, v: rf"#### \neq {v}",
    "at least": lambda answer, v: rf"\boxed{{\geq {v}}}",
    "about": lambda answer, v: f"#### about {v} eggs per day.",
    "denied": lambda answer, v: rf"\boxed{{\text{{not }} {v}}}",
    "denied in a sentence": lambda answer, v: f"The answer is not {v}.",
    "scaled": lambda answer, v: f"#### {v} thousand",
    "variable": lambda answer, v: f"#### {v}x",
    "chain": lambda answer, v: f"#### {v + 1} = {v}",
    "brackets": lambda answer, v: "#### " + "(" * 300 + str(v) + ")" * 300,
    "nothing after the mark": lambda answer, v: f"It is {v}. ####",
    "word after the mark": lambda answer, v: f"It is {v}. #### none",
    "closing mark": lambda answer, v: f"#### {v} ####",
    "full-width digits": lambda answer, v: (
        "#### " + "".join(chr(ord(digit) + 0xFEE0) for digit in str(v))
    ),
    "another script beside": lambda answer, v: f"#### {v} ٣",
    "zero-width split": lambda answer, v: f"#### {v}\u200b1",
    "divided by zero": lambda answer, v: f"#### {v}/0",
    "negative": lambda answer, v: f"#### -{v}",
    "negative dollars": lambda answer, v: f"#### -${v}",
    "negative with a minus sign": lambda answer, v: f"#### \u2212 {v}",
    "two in a box": lambda answer, v: rf"\boxed{{{v}, {v + 1}}}",
    "two in a box, right last": lambda answer, v: rf"\boxed{{{v + 1} or {v}}}",
    "open box": lambda answer, v: rf"{v} \boxed{{{v}",
    "empty box": lambda answer, v: rf"{v} \boxed{{}}",
    "right first, wrong last box": lambda answer, v: rf"\boxed{{{v}}} \boxed{{{v + 1}}}",
    "answer is one or the other": lambda answer, v: f"The answer is {v} or {v + 1}.",
    "answer is one or the other, right last": lambda answer, v: f"The answer is {v + 1} or {v}.",
    "right before, wrong last": lambda answer, v: f"It is {v}, no, {v + 1}",
    "empty": lambda answer, v: "",
    "no number": lambda answer, v: "I do not know.",
    "no message": lambda answer, v: [],
    "the user said it": lambda answer, v: [{"role": "user", "content": f"#### {v}"}],
    "a tool call": lambda answer, v: [{"role": "assistant", "content": None}],
}


@pytest.mark.parametrize("form", RIGHT)
def test_all_200_right_answers_are_right(form):
    # No reference is 0, so no form is degenerate.
    assert 0 not in VALUES and len(VALUES) == 200
    assert count_right(RIGHT[form]) == 200


@pytest.mark.parametrize("form", WRONG)
def test_all_200_wrong_answers_are_wrong(form):
    assert count_right(WRONG[form]) == 0


@pytest.mark.parametrize("form", DISGUISED)
def test_all_200_disguised_answers_are_wrong(form):
    assert count_right(DISGUISED[form]) == 0


def test_last_sentences_that_people_wrote_are_read():
    """The three others have a number after their result."""
    worked = [re.sub("<<.*?>>", "", answer.split("####")[0]) for answer in ANSWERS]
    assert sum(gsm8k_reward(worked, ANSWERS, [row["question"] for row in ROWS])) == 197


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-3/4", Fraction(-3, 4)),
        ("3 / 4 of a cake", Fraction(3, 4)),
        (r"\dfrac{-3}{4}", Fraction(-3, 4)),
        ("0.75", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("$-2", Fraction(-2)),
        ("- £1,234.50", Fraction(-2469, 2)),
        ("1,234,567", Fraction(1234567)),
        ("1 234 567", Fraction(1234567)),
        (r"1\frac{3}{4}", Fraction(7, 4)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"12.\overline{27}", Fraction(135, 11)),
        (r"1.2 \times 10^{-3}", Fraction(3, 2500)),
        ("1234,567", None),
        ("12,3456", None),
        ("1 1/2", Fraction(3, 2)),
        ("-11 5/6 cups", Fraction(-71, 6)),
        ("1 5/3", None),
        ("1 0/3", None),
        ("1e-3", Fraction(1, 1000)),
        ("4.5e33", Fraction(45 * 10**32)),
        ("0.42e2", None),
        ("42e0", None),
        (r"\frac{1}{3} \approx 0.33", Fraction(1, 3)),
        (r"\frac{1}{3} \approx 0.34", None),
        (r"42 \approx 42.0", None),
        ("3/0", None),
        ("", None),
        ("9" * 5000, None),
        ("1/" + "9" * 5000, None),
    ],
)
def test_a_number_is_read_exactly(text, number):
    numeral = read_numeral(text)
    assert (None if numeral is None else numeral.value) == number


def test_a_percent_sign_counts_where_it_is_asked_for():
    completions = ["#### 25%"] * 4
    prompts = [
        "There are 8 birds, 2 fly away. What percentage flew away?",
        [
            {"role": "user", "content": "There are 8 birds. How many % flew away?"},
            {"role": "assistant", "content": "Is it 2?"},
        ],
        "25 birds are 50% of all. How many are they?",
        "It fell by 25%. What is left?",
    ]
    assert gsm8k_reward(completions, ["25"] * 4, prompts) == [1.0, 1.0, 0.0, 0.0]
    assert gsm8k_reward(completions[:2], ["#### 25%", "25"]) == [1.0, 0.0]


def test_decimals_and_fractions_are_equal_only_exactly():
    completions = ["#### 0.75", "#### 0.3333333333", "#### 75"]
    assert gsm8k_reward(completions, ["#### 3/4", "1/3", 0.75]) == [1.0, 0.0, 0.0]


def test_a_reference_of_none_does_not_apply_and_an_unreadable_one_is_an_error():
    assert gsm8k_reward(["#### 1", "#### 2"], [None, 2]) == [None, 1.0]
    with pytest.raises(ValueError, match=r"GSM8K answer of row 1 is 'six'.*column 'answer'"):
        gsm8k_reward(["#### 1", "#### 6"], ["1", "six"])


@pytest.mark.slow
def test_long_hostile_texts_are_read_in_linear_time():
    """So long that a quadratic reading would run into the time limit of the tests."""
    pieces = ["1,111", "9", "#### ", "\\boxed{", "answer is ", "-", "$ ", "1/", "\\frac{1}", "1.1"]
    pieces += ["<answer>8\n", "answer \n", "option is (", "</think>", "#### 8\n", "\n", "not "]
    texts = [piece * (1_000_000 // len(piece)) for piece in pieces]
    texts += [text + " " * 1_000_000 + "x" for text in ("answer", "answer is", "<answer>", "####")]
    texts += ["<answer>" + "8\n" * 500_000]
    assert set(gsm8k_reward(texts, ["7"] * len(texts))) == {0.0}
    assert set(gsm8k_format_reward(texts)) == {0.0}


def test_the_format_is_one_last_line_with_one_mark_and_one_number():
    assert gsm8k_format_reward(ANSWERS) == [1.0] * 200
    right = ["#### 5", "a\n#### -1,234.5", "a\n#### $3/4\n", "a\n#### 2,125"]
    assert gsm8k_format_reward(right) == [1.0] * 4
    wrong = [
        "5",
        "a #### 5",
        "####5",
        "#### 5 eggs",
        "#### 5\nmore",
        "#### 5\n#### 5",
        "##### 5",
        "#### 1,2",
        "#### ",
        "",
    ]
    assert gsm8k_format_reward(wrong) == [0.0] * len(wrong)
