r"""The judges of answers side by side: 60 texts and what five rewards give to each, reviewed by
hand, and 1000 pairs that were written by hand, each with a verdict that a reader would give.

A line of `data/judges.jsonl` is a pair: the kind of what is tried, `right`, reference, completion,
and the question where it matters. None of them is taken from elsewhere.
"""

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from rloo.addons.graders.math.answer_extraction import ExtractedAnswer, boxed_answer, read_answer
from rloo.addons.graders.math.denial import denies_after, denies_before
from rloo.addons.graders.math.equation_sides import last_side, value_side
from rloo.addons.graders.math.normal_form import clean
from rloo.addons.graders.math.special_answers import as_tuples
from rloo.rewards import (
    gsm8k_format_reward,
    gsm8k_reward,
    make_exact_match,
    make_format,
    make_math,
)

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/judges.jsonl").read_text("utf-8").splitlines()
]
QUESTION = "He has 40 apples and gets 2. How many apples has he?"
# m: math, g: gsm8k, f: format, e: exact_match, n: gsm8k_format; the reference is 42. `\n` is a
# line break.
TABLE = r"""
mgfe-  <think>40+2</think><answer>42</answer>
mgfe-  <think>40+2</think><answer>\n42\n</answer>
mgfe-  <think>40+2</think>\n<answer> 42 </answer>
mgf--  <think>40+2</think><answer>42.</answer>
mgf--  <think>40+2</think><answer>42 apples</answer>
mgf--  <think>40+2</think><answer>**42**</answer>
mgf--  <think>40+2</think><answer>$42$</answer>
mgf--  <think>40+2</think><answer>\boxed{42}</answer>
mgf--  <think>40+2</think><answer>The answer is 42.</answer>
mgfe-  <think>\boxed{41}</think><answer>42</answer>
--f--  <think>\boxed{42}</think><answer>41</answer>
--f--  <think>The answer is 42.</think><answer>41</answer>
--f--  <think>40+2</think><answer>41, 42</answer>
--f--  <think>40+2</think><answer>41 or 42</answer>
--f--  <think>40+2</think><answer>41\n42</answer>
--f--  <think>40+2</think><answer>40+2</answer>
--f--  <think>40+2</think><answer>not 42</answer>
--f--  <think>40+2</think><answer>about 42</answer>
--f--  <think>40+2</think><answer>42%</answer>
--f--  <think>40+2</think><answer>42 dozen</answer>
-----  <think>40+2</think><answer></answer>
-----  <think>40+2</think><answer>42</answer> No, that is wrong.
mg-e-  <think>40+2</think><answer>41</answer><answer>42</answer>
mg---  <think>40+2</think>42
mg---  <think>40+2</think>The answer is 42.
mg-e-  <answer>42</answer>
mg-e-  <think>40+2</think><answer>42
mgf--  <think>40+2</think><answer>#### 42</answer>
mg--n  40 + 2 = 42\n#### 42
mg--n  40 + 2 = 42\n#### 42\n
mg---  40 + 2 = 42\n#### 42\n\nQuestion: What is next?
----n  40 + 2 = 42\n#### 72,
mg--n  #### 42,
mg---  #### *42*
mg---  #### __42__
mg--n  #### $42
mg---  #### 42 apples
-----  #### 40+2
-----  #### 42 or 41
-----  #### 42\n41
-----  #### 42\nNo, that is wrong.
mg-e-  42
mg-e-   42 \n
mg---  42.
mg---  __42__
mg---  $42$
mg---  \boxed{42}
mg---  \boxed 42
mg---  So $\boxed{42}$ apples.
mg---  The number that did not rot is $\boxed{42}$.
-----  It can't be $\boxed{42}$.
mg---  $x=\boxed{42}$. No other solutions exist.
-----  \boxed{41} or \boxed{42}
mg---  \boxed{42} or \boxed{42.0}
mg---  \boxed{\n42\n}
-----  \boxed{4\n2}
mg---  The answer is 42.
mg---  Answer: 42
mg---  The number of apples that did not rot is 42.
-----  I do not know.
"""


@pytest.fixture(scope="module")
def math_reward():
    reward = make_math(seconds=60.0)  # a busy machine must not make an answer missing
    yield reward
    reward.close()


def test_five_rewards_agree_on_60_texts(math_reward):
    rows = [(line[:5], line[7:]) for line in TABLE.strip("\n").split("\n")]
    texts = [text.replace(r"\n", "\n") for _, text in rows]
    answers, prompts = ["42"] * len(texts), [QUESTION] * len(texts)
    given = [
        math_reward(texts, answer=answers, prompts=prompts),
        gsm8k_reward(texts, answers, prompts),
        make_format()(texts),
        make_exact_match()(texts, answers),
        gsm8k_format_reward(texts),
    ]
    found = [
        "".join(mark if reward else "-" for mark, reward in zip("mgfen", row, strict=True))
        for row in zip(*given, strict=True)
    ]
    assert len(rows) == 60
    assert list(zip(found, texts, strict=True)) == [
        (wanted, text) for (wanted, _), text in zip(rows, texts, strict=True)
    ]
    # Nothing that is exactly the answer, or a right number in the wanted format, goes unpaid.
    assert all(("m" in row) == ("g" in row) and ("m" in row or "e" not in row) for row in found)


@pytest.mark.slow
def test_pairs_written_by_hand(math_reward):
    found = math_reward(
        [pair["completion"] for pair in PAIRS],
        answer=[pair["reference"] for pair in PAIRS],
        prompts=[pair.get("prompt", "") for pair in PAIRS],
    )
    wrong = [p for p, r in zip(PAIRS, found, strict=True) if r != float(p["right"])]
    assert wrong == []
    counts = Counter(pair["right"] for pair in PAIRS)
    assert counts == {True: 640, False: 360}


def test_gsm8k_gives_what_math_gives_to_numbers():
    """The same pairs, where the reference is a plain whole number and no choice is beside it."""
    whole = [p for p in PAIRS if str(p["reference"]).isdecimal() and "(B)" not in p["completion"]]
    found = gsm8k_reward(
        [pair["completion"] for pair in whole],
        [pair["reference"] for pair in whole],
        [pair.get("prompt", "") for pair in whole],
    )
    assert len(whole) == 352
    assert [p for p, r in zip(whole, found, strict=True) if r != float(p["right"])] == []


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{2}", ExtractedAnswer("1, 2", ("1", "2"))),
        (r"$\boxed{1}$ papers and $\boxed{2}$ bins", ExtractedAnswer("1, 2", ("1", "2"))),
        (r"\boxed{1}, no: \boxed{2}", ExtractedAnswer("2")),
        (r"\boxed{1}. \boxed{2}", ExtractedAnswer("2")),
        (r"It is \boxed{1}, not \boxed{2}.", ExtractedAnswer("1")),
        (r"It is not \boxed{1}.", ExtractedAnswer("")),
        (r"\boxed{1", ExtractedAnswer("")),
        (r"\boxed{\frac{1}{2}} \fbox{3}", ExtractedAnswer("3")),
        (r"\boxed{1}\boxed{2}", ExtractedAnswer("1, 2", ("1", "2"))),
        ("- \\boxed{1}\n- \\boxed{2}", ExtractedAnswer("1, 2", ("1", "2"))),
        (r"\boxed{1} or 2", ExtractedAnswer("")),
        (r"\boxed{\frac{1}{2}} or 0.5", ExtractedAnswer(r"\frac{1}{2}")),
        (r"$\boxed{1$", ExtractedAnswer("1")),
        ("1", None),
    ],
)
def test_boxes_that_words_join_are_one_answer(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("m+n = 42", "42"),
        (r"\angle A = 42", "42"),
        ("f^{-1}(2) = 42", "42"),
        (r"\text{Area} = 42", "42"),
        ("2x = 42", None),
        ("x+1 = 42", None),
        ("41 = 42", None),
        (r"\text{not } x = 42", None),
        ("x = 41 = 42", None),
        ("42", None),
    ],
)
def test_a_side_is_a_value_where_the_other_one_is_its_name(text, value):
    assert value_side(text) == value
    assert value_side("100m+n = 42", "Find $100m + n$.") == "42"


@pytest.mark.parametrize(
    ("text", "side"),
    [
        (r"6 \times 7 = 42", "42"),
        (r"A = \frac12 b h = 42", "42"),
        (r"V = 4 \cdot 3\pi = 12\pi", r"12\pi"),
        ("x = 41 = 42", "x = 41 = 42"),
        ("41 = 42", "41 = 42"),
        ("2x = 42", "2x = 42"),
        ("x^2+y^2 = 25", "x^2+y^2 = 25"),
        ("6 = x < 7", "6 = x < 7"),
    ],
)
def test_a_chain_in_a_sentence_is_its_last_side(text, side):
    assert last_side(text) == side


@pytest.mark.parametrize(
    ("text", "tuples"),
    [
        ("y=3, x=-1", "(-1,3)"),
        ("(x,y)=(1,2)", "(1,2)"),
        ("p=5,q=2;p=7,q=2", "(5,2), (7,2)"),
        ("AB=4, CD=5", "(4,5)"),
        ("x=1, x=2", "x=1, x=2"),
        ("x=1, y", "x=1, y"),
        ("x=1, y=2, x=3", "x=1, y=2, x=3"),
    ],
)
def test_values_by_name_are_tuples(text, tuples):
    assert as_tuples(text) == tuples
    assert as_tuples("p=1, x=2", ("x", "p")) == "(2,1)"


def test_an_answer_ends_where_its_tags_its_line_or_its_box_end():
    for text in (
        "<think>6 or 7</think><answer>5</answer>",
        "<answer>4</answer> no, <answer>5</answer>\nThere are 8.",
        "#### 5\nand 6 or 7",
        r"\boxed{5}, as 6 > 5",
        "The answer is 5. There are 6 cases.",
        "It is 6.\n5",
        "**5**",
    ):
        assert read_answer(text) == ExtractedAnswer("5"), text
    assert read_answer("I do not know.") is None


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("The product is $F_{n}F_k $.", "F_{n}F_k"),
        ("The product is $ F_{n}F_k$", "F_{n}F_k"),
        ("It costs $5 in $", "$5"),
        ("Between $3 and 4 $.", None),
    ],
)
def test_a_formula_at_the_end_may_have_a_space_at_one_side(text, formula):
    found = read_answer(text)
    assert (found and found.text) == formula


@pytest.mark.parametrize(
    ("texts", "normal"),
    [
        (
            (" x^2\n +  1 ", r"$x^2 + 1$", r"\(x^2 + 1\)", r"\boxed{x^2 + 1}.", "**x^2 + 1**"),
            "x^2 + 1",
        ),
        ((r"\frac12", r"\dfrac{1}2", "½", r"\tfrac 1 2"), r"\frac{1}{2}"),
        ((r"\mathrm{i}", r"\text{ i }", "i"), "i"),
        ((r"\exp(x)", r"\exp{x}", r"\mathrm{e}^{x}".replace("e}", "e}")), "e^{x}"),
        ((r"\left[1,2\right)", r"\lbrack 1,2)", r"\big[1,2\big)"), None),
        (
            (
                "\\left[\\begin{array}{cc}1&2\\\\\n3&4\\\\\\end{array}\\right]",
                r"\begin{bmatrix}1&2\\ 3&4\end{bmatrix}",
                r"\begin{pmatrix}1&2\\[2pt] 3&4\end{pmatrix}",
            ),
            r"\begin{pmatrix}1&2\\ 3&4\end{pmatrix}",
        ),
    ],
)
def test_one_normal_form(texts, normal):
    forms = {clean(text).replace("e ^", "e^").replace("[ ", "[") for text in texts}
    assert len(forms) == 1
    assert normal is None or forms == {normal}


@pytest.mark.parametrize(
    ("before", "denied"),
    [
        ("It is not", True),
        ("It is not, in fact,", True),
        ("We do not get", True),
        (r"x \ne ", True),
        ("I do not think that it is", True),
        ("Those who did not vote are", False),
        ("If it is not, we get", False),
        ("The one that is not prime:", False),
        ("It is not 3. It is", False),
        ("Not 3 but", False),
    ],
)
def test_a_denial_before_an_answer_is_its_predicate(before, denied):
    assert denies_before(before) is denied


@pytest.mark.parametrize(
    ("after", "denied"),
    [
        (" is wrong", True),
        (". No, it is not.", True),
        (". Wait. That's not right.", True),
        (", which is false", True),
        (" unless I err", True),
        (", not 3", False),
        (". No other solutions exist.", False),
        (" is not prime", False),
        (", since 3 is wrong", False),
        (". That is not a prime.", False),
        (". It is not possible to do better.", False),
        (". That's not possible.", True),
        (". It does not equal 43.", False),
        (" does not work", True),
        (", and it would be wrong to stop here", False),
    ],
)
def test_a_denial_after_an_answer_speaks_of_it(after, denied):
    assert denies_after(after) is denied


def test_a_list_is_several_accepted_references(math_reward):
    accepted = [["1/2", "two"], ["x +* y", r"2\sqrt{2}"], [], [None]]
    texts = [r"\boxed{0.5}", r"\boxed{\sqrt{8}}", "1", "1"]
    assert math_reward(texts, answer=accepted) == [1.0, 1.0, None, None]
    assert gsm8k_reward(["#### 2", "#### 3", "1"], [["1", "2"], ["1", "2"], []]) == [1.0, 0.0, None]
    exact = make_exact_match()
    assert exact(["a", "b", "c", "['a']"], [["a", "b"]] * 3 + [["a"]]) == [1.0, 1.0, 0.0, 0.0]


def test_the_time_of_a_call_is_that_of_the_processor(math_reward, monkeypatch):
    """A judge that the machine keeps waiting for longer than its budget still gives its verdict."""
    assert math_reward([r"\boxed{2x}"], answer=["3x-x"]) == [1.0]
    (worker,) = math_reward._pool.pids
    judges = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    monkeypatch.setattr(math_reward, "_seconds", 0.3)  # and 0.1 s for the answer
    for judge in judges:
        os.kill(int(judge), signal.SIGSTOP)
    found = []
    call = threading.Thread(
        target=lambda: found.extend(math_reward([r"\boxed{x \cdot 2}"], answer=["2x"]))
    )
    call.start()
    time.sleep(1.2)
    for judge in judges:
        os.kill(int(judge), signal.SIGCONT)
    call.join()
    assert found == [1.0]
