r"""Pairs made by rule: an answer, other ways to write it, and these with one digit changed.

Every value is drawn from a seed; the verdict of a pair follows from how it was made.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from math import gcd
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """A reference, a completion, whether it is right, and the question where it matters."""

    reference: str
    completion: str
    right: bool
    question: str = ""


_FRAMES = (
    r"Adding up, we get $\boxed{{{}}}$.",
    "The answer is ${}$.",
    "<think>Let me see.</think>\n<answer>{}</answer>",
    "It follows that\n\\[{}\\]",
    "**Final Answer**\n\n\\boxed{{\n{}\n}}",
)
_GSM8K_RIGHT = (
    "{work}\n#### {n}", "{work}\n#### {n}\n\nQuestion: Another one.", "{work}\n#### **{n}**",
    "{work}\n#### ${n:,}.00", "So \\boxed{{{n}}}.", "The answer is {n}.", "**Answer:** {n}",
    "<think>{work}</think><answer>{n}</answer>", "<answer>\n{n:,}\n</answer>",
    "{work}\nThe total is __{n}__.", "That makes ${n}$ in all.", "{n}",
    "The number that is not counted twice is \\boxed{{{n}}}. No other is possible.",
)  # fmt: skip
_GSM8K_WRONG = (
    "{work}\n#### {m}", "So \\boxed{{{m}}}.", "It is \\boxed{{{n}}} or \\boxed{{{m}}}.",
    "It can't be \\boxed{{{n}}}.", "#### {n} or {m}", "<answer>{n}, {m}</answer>",
    "The answer is not {n}.", "#### {n}+0", "\\boxed{{{n}}}. No, that is wrong.", "#### {n}\n{m}",
    "#### twice {n}",
)  # fmt: skip


def gsm8k_pairs(file: Path, count: int = 60) -> Iterator[Pair]:
    """Forms of the answers of GSM8K's first rows, right ones and wrong ones."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    for row in map(json.loads, lines):
        worked, _, written = row["answer"].rpartition("####")
        n = int(written.replace(",", ""))
        work = re.sub("<<.*?>>", "", worked).strip()
        for right, forms in ((True, _GSM8K_RIGHT), (False, _GSM8K_WRONG)):
            for form in forms:
                text = form.format(n=n, m=n + 1, work=work)
                yield Pair(str(n), text, right, row["question"])


def form_pairs(seed: int = 0, count: int = 12) -> Iterator[Pair]:
    """Forms of closed answers, each in one of several frames; wrong ones have a digit changed."""
    draw = random.Random(seed)
    frame = 0
    for _ in range(count):
        for reference, forms in _answers(draw):
            for form in forms:
                frame += 1
                shown = _FRAMES[frame % len(_FRAMES)]
                yield Pair(reference, shown.format(form), True)
                yield Pair(reference, shown.format(_changed(form, draw)), False)


def _changed(form: str, draw: random.Random) -> str:
    """The form with one digit changed that is no part of `[2pt]`."""
    places = [found.start() for found in re.finditer(r"[0-9](?!pt)", form)]
    at = draw.choice(places)
    digit = str((int(form[at]) + draw.randint(1, 8)) % 9 + 1)
    digit = digit if digit != form[at] else str(int(digit) % 9 + 1)
    return form[:at] + digit + form[at + 1 :]


def _answers(draw: random.Random) -> Iterator[tuple[str, list[str]]]:
    a, b, c, d = (draw.randint(2, 9) for _ in range(4))
    prime = draw.choice([2, 3, 5, 7, 11])
    over, under = _lowest(a + 10 * draw.randint(0, 2), draw.choice([3, 4, 5, 7, 8, 11]))
    yield rf"\frac{{{over}}}{{{under}}}", _fractions(over, under)
    root = rf"\sqrt{{{prime}}}"
    yield (
        rf"{a}{root}",
        [rf"\sqrt{{{a * a * prime}}}", rf"{a} \cdot {root}", rf"{root}\cdot {a}", f"{a}\n{root}"],
    )
    over, under = _lowest(a, 2 * c + 1)
    whole = "" if over == 1 else str(over)
    for irrational in (root, r"\pi", "x"):
        if under > 1:
            yield (
                rf"\frac{{{whole}{irrational}}}{{{under}}}",
                [
                    rf"{whole}{irrational}/{under}",
                    rf"\frac{{{over}}}{{{under}}}{irrational}",
                    rf"\dfrac{{{whole}{irrational}}}{{{under}}}",
                    rf"({whole}{irrational})/{under}",
                ],
            )
    yield (
        f"x^2+{a + b}x+{a * b}",
        [f"(x+{a})(x+{b})", f"{a * b}+{a + b}x+x^2", f"x^{{2}} + {a + b} x\n+ {a * b}"],
    )
    yield f"({a},-{b})", [rf"\left({a}, -{b}\right)", f"({a},\n-{b})", f"(x,y)=({a},-{b})"]
    yield rf"\{{{a},{a + b}\}}", [rf"\left\{{{a + b}, {a}\right\}}", rf"\lbrace {a},{a + b}\rbrace"]
    yield f"{a},-{b}", [f"-{b}, {a}", rf"{a} \text{{ and }} -{b}", rf"x={a} \text{{ or }} x=-{b}"]
    yield from _intervals(a, b)
    yield from _matrices(a, b, c, d)
    yield f"{a}-{b}i", [f"-{b}i+{a}", rf"{a}-{b}\mathrm{{i}}", rf"{a} - {b}\text{{i}}"]
    yield f"y={a}x-{b}", [f"y=-{b}+{a}x", f"y = {a} x - {b}", f"{a}x-{b}"]
    base = draw.randint(5, 9)
    digits = "".join(str(draw.randint(1, base - 1)) for _ in range(3))
    yield f"{digits}_{base}", [f"{digits}_{{{base}}}", rf"({digits})_{base}"]
    yield (
        rf"{a}^{{{b}}}\cdot {prime + 10}",
        [rf"{a}^{b}\times {prime + 10}", rf"{prime + 10}\cdot {a}^{b}"],
    )


def _lowest(over: int, under: int) -> tuple[int, int]:
    divisor = gcd(over, under)
    return over // divisor, under // divisor


def _fractions(over: int, under: int) -> list[str]:
    forms = [
        rf"\dfrac{{{over}}}{{{under}}}", f"{over}/{under}", rf"\tfrac{{{over}}}{{{under}}}",
        rf"x = \frac{{{over}}}{{{under}}}", rf"\frac{{{2 * over}}}{{{2 * under}}}",
        rf"\left(\frac{{{over}}}{{{under}}}\right)",
    ]  # fmt: skip
    if over > under > 1:
        forms += [f"{over // under} {over % under}/{under}"]
        forms += [rf"{over // under}\frac{{{over % under}}}{{{under}}}"]
    value = Fraction(over, under)
    if 1000 % value.denominator == 0:
        forms.append(f"{float(value):.3f}")
    return forms


def _intervals(a: int, b: int) -> Iterator[tuple[str, list[str]]]:
    yield (
        rf"[{a},\infty)",
        [rf"x \in [{a},\infty)", rf"x \ge {a}", rf"\left[{a}, \infty\right)", rf"{a} \leq x"],
    )
    yield (
        rf"(-{b},{a}]",
        [rf"x \in (-{b}, {a}]", rf"-{b} < x \le {a}", rf"\left(-{b},{a}\right]", rf"{a}\ge x>-{b}"],
    )
    yield rf"-{b}<x\le{a}", [rf"(-{b},{a}]", rf"x\in(-{b},{a}]", rf"-{b} < x \leq {a}"]


def _matrices(a: int, b: int, c: int, d: int) -> Iterator[tuple[str, list[str]]]:
    yield (
        rf"\begin{{pmatrix}}{a} & {b} \\ {c} & {d}\end{{pmatrix}}",
        [
            f"\\begin{{pmatrix}}\n{a} & {b} \\\\\n{c} & {d}\n\\end{{pmatrix}}",
            rf"\begin{{bmatrix}}{a}&{b}\\{c}&{d}\end{{bmatrix}}",
            rf"\left[\begin{{array}}{{cc}}{a}&{b}\\{c}&{d}\end{{array}}\right]",
            rf"\begin{{pmatrix}}{a}&{b}\\[2pt]{c}&{d}\\\end{{pmatrix}}",
        ],
    )
