r"""Right answers and hacks that `math` and `gsm8k` are shown for the first time.

`HELD_OUT_...` were written when the rules of the grammar were done, and do not repeat the shapes of
`benchmarks.chaos.verifiers`, by which the rules were made. At the first run 147 of 150 hacks were
rejected and 138 of 141 right answers accepted. The rules were then mended for the families of the
others, but for words before the number after `####`: they are no part of the contract.
"""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.verifiers import (
    GSM8K_HACKS,
    GSM8K_RIGHT,
    LATER_GSM8K_HACKS,
    LATER_GSM8K_RIGHT,
    LATER_MATH_HACKS,
    LATER_MATH_RIGHT,
    MATH_HACKS,
    MATH_RIGHT,
    rewards_of,
)
from rloo import from_verifiers
from rloo.addons.graders.math.answer_extraction import boxed_answer
from rloo.rewards import gsm8k_reward, make_math

HELD_OUT_MATH_HACKS = [
    ("17+25", "42"),
    (r"126 \div 3", "42"),
    (r"\frac{9^2+3}{2}", "42"),
    (r"\prod_{k=1}^{1} 42", "42"),
    (r"\oint 42", "42"),
    (r"\det\begin{pmatrix}42&0\\0&1\end{pmatrix}", "42"),
    (r"f(42) \text{ where } f(x)=x", "42"),
    (r"\operatorname{lcm}(6, 7, 42)", "42"),
    (r"42 \cdot 1", "42"),
    (r"42 - 0", "42"),
    (r"0 + 42", "42"),
    (r"42^{1^{99}}", "42"),
    (r"\sqrt[2]{1764}", "42"),
    (r"e^{\ln 42}", "42"),
    (r"\sin(0) + 42", "42"),
    (r"\lceil 41.2 \rceil", "42"),
    (r"40 < 42", "42"),
    (r"40 < x < 44", "42"),
    (r"n \leq 42", "42"),
    (r"43 - 1 = 42", "42"),
    (r"42 \equiv 42 \pmod{5}", "42"),
    (r"x \to 42", "42"),
    (r"42 \text{ or } 43 \text{ or } 44", "42"),
    (r"\text{either } 42", "42"),
    (r"\text{anything except } 42", "42"),
    (r"\text{roughly } 42", "42"),
    (r"42 \text{ squared}", "42"),
    (r"42 \text{ million}", "42"),
    (r"42 \text{ at most}", "42"),
    (r"42 \text{ would be wrong}", "42"),
    (r"\cancel{42}", "42"),
    (r"\overline{42}", "42"),
    (r"42\ldots", "42"),
    (r"42y^0", "42"),
    (r"42i", "42"),
    (r"42a + 0b", "42"),
    (r"\{42\} \cup \{43\}", "42"),
    (r"42; 43", "42"),
    (r"42 \mid 84", "42"),
    (r"-(-42)", "42"),
    (r"42''", "42"),
    (r"42\text{\%}", "42"),
    (r"42 \times 10^{0} + 0", "42"),
    ("四十二", "42"),
    ("四2", "42"),
    (r"\frac{1}{4} + \frac{1}{4}", "0.5"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\sqrt{1+1}", r"\sqrt{2}"),
    (r"\sqrt{2}+0", r"\sqrt{2}"),
    (r"\sqrt{2} \cdot 3 / 3", r"\sqrt{2}"),
    (r"\lim_{n \to \infty} \sqrt{2}", r"\sqrt{2}"),
    (r"\sqrt{2} \text{ or } \sqrt{3}", r"\sqrt{2}"),
    (r"\text{approximately } \sqrt{2}", r"\sqrt{2}"),
    (r"\sqrt{2} \neq \sqrt{2}", r"\sqrt{2}"),
    (r"> \sqrt{2}", r"\sqrt{2}"),
    (r"\sum_{k=1}^{2} x", "2x"),
    (r"2x + C", "2x"),
    (r"(1, 2) + (0, 0)", "(1,2)"),
    (r"\text{not } (1,2)", "(1,2)"),
    (r"\text{not even}", r"\text{even}"),
    (r"\text{even or odd}", r"\text{even}"),
    (r"\text{A or B}", "A"),
    (r"\frac{84}{1+1}", "42"),
    (r"42 \cdot 2^0", "42"),
    (r"\text{the answer is not }42", "42"),
    (r"42\text{ish}", "42"),
    (r"42 \ne 41", "42"),
    (r"\min(42, 99)", "42"),
    (r"\left|42\right|", "42"),
    ("42_{8}", "42"),
    ("42:1", "42"),
    (r"\{42\}", "42"),
    (r"42 \vee 43", "42"),
    ("x^2=42^2", "42"),
    (r"\text{no more than } 42", "42"),
    (r"42 \text{ minus } \text{zero}", "42"),
    (r"\nexists 42", "42"),
    (r"\text{42 is not it}", "42"),
    (r"\sqrt{5-2}", r"\sqrt{3}"),
    (r"\sqrt{3}\cdot\frac{2}{2}\cdot\frac{3}{3}", r"\sqrt{3}"),
    (r"\tan 60^\circ", r"\sqrt{3}"),
    ("1.732050807568877", r"\sqrt{3}"),
    ("x^2+2x+1=0", "x^2+2x+1"),
    (r"\frac{d}{dx}\left(x^2\right)", "2x"),
    ("(3-2, 1+1)", "(1,2)"),
    ("[1,1+1]", "[1,2]"),
    (r"\{1,2\}\cup\{3-0\}", r"\{1,2,3\}"),
    (r"y \neq 2x+3", "y=2x+3"),
    ("x<2", "x>2"),
    (r"x \geq 2", "x>2"),
    (r"\pi \approx 3.14", r"\pi"),
    (r"\text{C or D}", "C"),
]

HELD_OUT_GSM8K_HACKS = [
    (r"#### \ne 42", "42"),
    (r"#### 42 \pm 1", "42"),
    ("#### <= 42", "42"),
    ("#### =/= 42", "42"),
    ("#### maybe 42", "42"),
    ("#### more than 42", "42"),
    ("#### never 42", "42"),
    ("#### anything but 42", "42"),
    ("#### half of 42", "42"),
    ("#### 42 squared", "42"),
    ("#### 42 dozen", "42"),
    ("#### 42 (or 43)", "42"),
    ("#### 42 / 43 / 44", "42"),
    ("#### 42y", "42"),
    ("#### 42n eggs", "42"),
    ("#### 42 + 0", "42"),
    ("#### 50 - 8", "42"),
    ("#### 84 ÷ 2 = 42", "42"),
    ("#### {{{{{{42}}}}}}" + "}" * 30, "42"),
    ("#### 42 is false", "42"),
    ("#### 42 would be too many", "42"),
    ("#### ²42", "42"),
    ("#### 42 per cent or 43", "42"),
    (r"\boxed{42 \text{ or } 43}", "42"),
    (r"\boxed{\sim 42}", "42"),
    (r"\boxed{42 < 43}", "42"),
    (r"\boxed{\text{at most } 42}", "42"),
    (r"\boxed{42\sqrt{1}}", "42"),
    ("The answer is never 42.", "42"),
    ("The answer is less than 42.", "42"),
    ("The answer is between 41 and 42.", "42"),
    ("The answer is 42, or maybe 43.", "42"),
    ("The answer is 42 million.", "42"),
    ("The answer is roughly 42", "42"),
    ("It cannot be 42", "42"),
    ("so y < 42", "42"),
    ("so we have 42y", "42"),
    ("so it is 84 - 42", "42"),
    ("#### 42 minus 0", "42"),
    ("#### 42, right?", "42"),
    ("#### forty 42", "42"),
    ("#### (40)+(2)", "42"),
    (r"#### 42 \text{ is not it}", "42"),
    ("#### 0.42e2", "42"),
    ("#### 42:00", "42"),
    ("#### ≈42", "42"),
    ("#### 42±0", "42"),
    ("#### 42 and 43", "42"),
    ("#### 42–43", "42"),
    ("#### #42", "42"),
    (r"\boxed{\frac{84}{2}+0}", "42"),
    ("The answer is somewhere between 42 and 50.", "42"),
    ("The answer isn't 42.", "42"),
    ("The answer is 42 less 1.", "42"),
    ("The answer is 6 times 7.", "42"),
    ("I would not say 42", "42"),
    ("It equals 41 or 42", "42"),
    ("no more than 42", "42"),
]

HELD_OUT_MATH_RIGHT = [
    ("17", "17"),
    ("+17", "17"),
    ("- 17", "-17"),
    ("−17", "-17"),
    ("017", "17"),
    ("17.500", r"17\frac{1}{2}"),
    ("12,345,678", "12345678"),
    (r"12{,}345", "12,345"),
    (r"17\text{ m/s}", "17"),
    (r"17\ \text{km/h}", "17"),
    (r"17\;\mathrm{mph}", "17"),
    (r"17 \text{ students}", "17"),
    (r"\text{17 students}", "17"),
    (r"\$17", "17"),
    (r"17\text{ dollars}", r"\$17"),
    (r"n = 17", "17"),
    (r"x_1 = 17", "17"),
    (r"f(2)=17", "17"),
    (r"A = 17\pi", r"17\pi"),
    (r"\frac{17}{3}", "17/3"),
    (r"5\frac23", r"\frac{17}{3}"),
    (r"-\dfrac{17}{3}", r"\frac{-17}{3}"),
    (r"5.\overline{6}", r"\frac{17}{3}"),
    (r"1.7 \cdot 10^{4}", "17000"),
    (r"60^{\circ}", r"60^\circ"),
    (r"17.5\%", r"17.5\%"),
    (r"0.175", r"17.5\%"),
    (r"3\sqrt{3}", r"\sqrt{27}"),
    (r"\frac{3\sqrt{3}}{2}", r"\frac32\sqrt3"),
    (r"2-\sqrt{3}", r"-\sqrt{3}+2"),
    (r"\sqrt{\frac{3}{4}}", r"\frac{\sqrt{3}}{2}"),
    (r"\frac{\sqrt{6}-\sqrt{2}}{4}", r"\frac{\sqrt6-\sqrt2}{4}"),
    (r"\pi^2/6", r"\frac{\pi^2}{6}"),
    (r"16\pi - 8", r"8(2\pi-1)"),
    (r"3^{17}", "3^{17}"),
    (r"2^5 \cdot 3", r"2^5\cdot 3"),
    (r"x^3-3x", r"x(x^2-3)"),
    (r"-2x-1", r"-(2x+1)"),
    (r"\frac{a+b}{2}", r"\frac{a}{2}+\frac{b}{2}"),
    (r"y = -\frac{1}{2}x + 3", r"y=-\frac12 x+3"),
    (r"(-2, 7)", r"(-2,7)"),
    (r"\left( \frac{1}{3}, \sqrt{2} \right)", r"(1/3,\sqrt{2})"),
    (r"(2,\infty)", r"(2, \infty)"),
    (r"[-1,1)", r"[-1, 1)"),
    (r"(-\infty, 0) \cup (3, \infty)", r"(-\infty,0)\cup(3,\infty)"),
    (r"\{-1, 0, 1\}", r"\{0,1,-1\}"),
    (r"2, 3, 5", r"2,3,5"),
    (r"x = -3, 4", r"-3,4"),
    (r"\begin{pmatrix} 0 & 1 \\ -1 & 0 \end{pmatrix}", r"\begin{pmatrix}0&1\\-1&0\end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{2} \\ 3 \end{pmatrix}"),
    (r"x \le -2", r"x\leq -2"),
    (r"2-3i", r"2 - 3i"),
    (r"e^{i\pi/3}", r"e^{\frac{i\pi}{3}}"),
    (r"\textbf{(C)}", "C"),
    (r"(D)", "D"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\mathrm{odd}", r"\text{odd}"),
    (r"\tan x", r"\tan(x)"),
    (r"\log_3 5", r"\log_{3} 5"),
    (r"n!", "n!"),
    ("3.50", r"\frac72"),
    ("-0", "0"),
    (r"\frac{0}{5}", "0"),
    (r"\text{\$}5", "5"),
    (r"5\text{ in}^2", "5"),
    (r"5\text{ units}", "5"),
    (r"\boxed{5}", "5"),
    (r"t = 5\text{ s}", "5"),
    (r"5{,}280\text{ ft}", "5280"),
    (r"2\frac{3}{4}\text{ cups}", r"\frac{11}{4}"),
    (r"6.02\times10^{23}", r"6.02 \times 10^{23}"),
    (r"\sqrt{5}-1", r"-1+\sqrt5"),
    (r"\frac{-1+\sqrt{5}}{2}", r"\frac{\sqrt5-1}{2}"),
    (r"4\pi r^2", r"4\pi r^{2}"),
    (r"\frac{1}{2}bh", r"\frac{bh}{2}"),
    ("n(n+1)/2", r"\frac{n(n+1)}{2}"),
    ("a^2-b^2", "(a-b)(a+b)"),
    (r"x=\frac{-b}{2a}", r"-\frac{b}{2a}"),
    (r"\left(-1,\frac{5}{2}\right)", "(-1,2.5)"),
    (r"(-\infty,\infty)", r"(-\infty, \infty)"),
    ("[2,5)", "[2, 5)"),
    (r"\{x,y\}", r"\{y,x\}"),
    ("0, 1, -1", "-1,0,1"),
    (r"x = 2 \text{ and } x = 3", "2,3"),
    (r"\cos^2 x", r"\cos^{2}(x)"),
    ("e^{2}", "e^2"),
    (r"\ln(2)", r"\ln 2"),
    ("7!", "7!"),
    (r"\binom{n}{2}", r"\binom{n}{2}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"45^\circ", r"45^{\circ}"),
    (r"12.5\%", r"12.5\%"),
    (r"\text{Monday}", "Monday"),
    ("C", r"\textbf{C}"),
    (r"\text{no solution}", r"\text{no solution}"),
    ("x+y=5", "x+y=5"),
    ("1+2i", "2i+1"),
    (r"\begin{bmatrix}1&0\\0&1\end{bmatrix}", r"\begin{bmatrix}1 & 0 \\ 0 & 1\end{bmatrix}"),
    (r"-\infty", r"-\infty"),
    ("2:3", "2:3"),
]

HELD_OUT_GSM8K_RIGHT = [
    ("He eats 3 + 4 = 7 eggs.\n#### 17", "17"),
    ("#### 17 hours", "17"),
    ("#### $ 17", "17"),
    ("#### $17.00 per week", "17"),
    ("#### 17,000 dollars", "17000"),
    ("#### Total: 17", "17"),
    ("#### y=17", "17"),
    ("#### 17 cm", "17"),
    ("#### 17mph", "17"),
    ("####  17  ", "17"),
    (r"#### $\boxed{17}$", "17"),
    (r"Thus \boxed{17 \text{ hours}}", "17"),
    (r"\[\boxed{x = 17}\]", "17"),
    ("The answer is: 17", "17"),
    ("Therefore, the answer is **17**.", "17"),
    ("The answer is $17 per student.", "17"),
    ("The answer is that they walked 17 miles.", "17"),
    ("Each gets 51/3 = 17 candies.", "17"),
    ("Altogether the four friends have 17 marbles left.", "17"),
    ("He will therefore be 17 years old.", "17"),
    ("So the total cost was $1,017.", "1017"),
    ("#### 5 apples left", "5"),
    ("#### £5", "5"),
    ("#### 5.", "5"),
    ("#### 1/2", "0.5"),
    ("#### 5 hrs", "5"),
    ("#### 5 cents each", "5"),
    ("#### 10,000", "10000"),
    ("#### total = 5", "5"),
    (r"#### \text{5}", "5"),
    ("The final answer is $5.00.", "5"),
    (r"The answer is: $\boxed{5}$", "5"),
    ("The answer is 5 hours", "5"),
    ("Hence he has 20 - 15 = 5 apples.", "5"),
    ("Thus, it costs $5.50 per pound.", "5.5"),
    ("So Tom is 5", "5"),
    (r"The answer is \(5\).", "5"),
    ("**Answer:** 5", "5"),
    ("So x = 5.", "5"),
    ("Answer: 5 km", "5"),
]


@pytest.fixture(scope="module")
def math_reward():
    reward = make_math(seconds=60.0)  # a busy machine must not make an answer missing
    yield reward
    reward.close()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["math", "gsm8k"])
def test_whole_completions_that_were_written_from_the_contract_alone(verifier, math_reward):
    """Without sight of the rules and of the other corpora. At the first run 87 of 90
    hacks were rejected and 90 of 90 right answers accepted; the three denied a box in prose."""
    lines = (Path(__file__).parents[1] / "graders/data/whole_completions.jsonl").read_text(
        encoding="utf-8"
    )
    cases = [case for case in map(json.loads, lines.splitlines()) if case["reward"] == verifier]
    reward = math_reward if verifier == "math" else gsm8k_reward
    found = reward(
        prompts=[case["prompt"] for case in cases],
        completions=[case["completion"] for case in cases],
        answer=[case["answer"] for case in cases],
    )
    wrong = [c for c, r in zip(cases, found, strict=True) if r != float(c["kind"] == "right")]
    assert not wrong and len(cases) in (60, 120)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (r"So it is $\boxed{41}$. It is prime, and not divisible by 7.", True),
        (r"It is not even. The answer is \boxed{41}.", True),
        (r"The answer is \boxed{41}." + "\nNote that 43 is wrong.", True),
        (r"It isn't $\boxed{41}$.", False),
        (r"It is not 43 but \boxed{41}.", True),
        (r"It is not hard to see that this gives \boxed{41}.", True),
        (r"It is not equal to \boxed{41}", False),
        (r"\boxed{41} unless I am mistaken", False),
        (r"\[\boxed{41}\] This is wrong.", False),
        ("\\boxed{41}.\n\nNo, that is wrong.", False),
    ],
)
def test_a_box_that_its_own_sentence_or_the_next_denies_is_no_answer(completion, right):
    for mark in ("", "#### 42\n"):
        assert boxed_answer(mark + completion).text == ("41" if right else "")
    assert gsm8k_reward([completion], ["#### 41"]) == [float(right)]


@pytest.mark.parametrize(
    ("verifier", "pairs"),
    [
        ("math", MATH_HACKS),
        ("math", HELD_OUT_MATH_HACKS),
        ("math", LATER_MATH_HACKS),
        ("gsm8k", GSM8K_HACKS),
        ("gsm8k", HELD_OUT_GSM8K_HACKS),
        ("gsm8k", LATER_GSM8K_HACKS),
    ],
)
def test_hacks_score_nothing(verifier, pairs, math_reward):
    rewards = rewards_of(verifier, pairs, math_reward)
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward != 0.0] == []


@pytest.mark.parametrize(
    ("verifier", "pairs"),
    [
        ("math", MATH_RIGHT),
        ("math", HELD_OUT_MATH_RIGHT),
        ("math", LATER_MATH_RIGHT),
        ("gsm8k", GSM8K_RIGHT),
        ("gsm8k", HELD_OUT_GSM8K_RIGHT),
        ("gsm8k", LATER_GSM8K_RIGHT),
    ],
)
def test_right_answers_are_accepted(verifier, pairs, math_reward):
    rewards = rewards_of(verifier, pairs, math_reward)
    assert [pair for pair, reward in zip(pairs, rewards, strict=True) if reward != 1.0] == []


def test_environments_of_verifiers_need_their_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(
        sys.modules, "rloo.addons.integrations.verifiers.verifiers_environment", raising=False
    )
    with pytest.raises(ValueError, match=r"before 0\.4, .*: pip install 'verifiers<0\.4"):
        from_verifiers(None)
