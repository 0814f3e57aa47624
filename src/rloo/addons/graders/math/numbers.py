r"""Parses a number given as an answer. The value is exact, and the text must be only a number.

The grammar of plain text and LaTeX is

    answer  := [label] [sign] [currency] [sign] value [unit]
    label   := a name, or a few words, before `=` or `:`; or `the (final) answer is`
    value   := 1,234.5 | 3/4 | \frac{3}{4} | 1\frac{3}{4} | 1 3/4 | 1.2 \times 10^{3} | 1.2e3
             | 10^{3} | 0.\overline{3}, and after a fraction \approx with its rounded value
    unit    := [currency] [% | ^\circ | '] | up to five words: eggs, \text{ m}^2, miles/hour

No word of a label or a unit may change the value (not, about, at least, twice, thousand, ...);
`rloo.addons.graders.math.wording` has these words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rloo.addons.graders.math.denial import denies_before, retracts
from rloo.addons.graders.math.equation_sides import value_side
from rloo.addons.graders.math.normal_form import clean
from rloo.addons.graders.math.wording import (
    changes_value,
    changes_value_after,
    is_statement,
    is_unit,
    since_verb,
)

MAX_CHARACTERS = 1000


_INT = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_NUM = rf"(?:(?:{_INT})(?:\.[0-9]+)?|\.[0-9]+)"
_GROUP = r"(?:\{{\s*(?P<{0}>[+-]?\s*{1})\s*\}}|(?P<{0}1>[0-9]))"
_FRACTION = (
    rf"(?:(?P<whole>{_INT})\s*)?\\frac\s*"
    + _GROUP.format("over", _NUM)
    + r"\s*"
    + _GROUP.format("under", _NUM)
)
_POWER = rf"(?:(?P<factor>{_NUM})\s*(?:\\times|\\cdot|\*)\s*)?10\s*\^\s*" + _GROUP.format(
    "exponent", "[0-9]{1,3}"
)
_PERIODIC = r"(?P<before>[0-9]*)\.(?P<start>[0-9]*)\\overline\s*\{\s*(?P<period>[0-9]+)\s*\}"
_MIXED = r"(?P<units>[0-9]+) +(?P<part>[0-9]{1,3}) */ *(?P<parts>[0-9]{1,3})(?![0-9])"
_SCIENTIFIC = r"(?P<mantissa>[1-9](?:\.[0-9]+)?)e(?P<power>[+-]?[0-9]{1,3})(?![0-9A-Za-z])"
_APPROXIMATELY = re.compile(r"(.+?)\\approx\s*(-?[0-9]+(?:\.([0-9]+))?)")
_CURRENCY = r"(?:\\?\$|[\u00a3\u20ac\u00a5\uffe5\u20b9])"
_LABEL = (
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?)\s*[=:]"
    r"|(?P<words>[A-Za-z][A-Za-z' ]{0,60}|\\text\s*\{[A-Za-z' ]{1,60}:?\s*\})\s*[=:]"
    r"|(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|total\s+)?"
    r"(?:answer|result|total|value)\s+is\s*:?)"
)
_NUMERAL = re.compile(
    rf"(?:{_LABEL}\s*)?(?P<sign>[+-])?\s*(?:{_CURRENCY}\s*)?(?P<sign2>[+-])?\s*"
    rf"(?:{_FRACTION}|{_PERIODIC}|{_POWER}|{_MIXED}|{_SCIENTIFIC}"
    rf"|(?P<number>{_NUM})(?:\s*/\s*(?P<denominator>{_NUM}))?)"
    rf"(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_DECORATION = re.compile(
    rf"\s*(?:{_CURRENCY})?\s*(?P<mark>%|\^\\circ|''?)?\s*(?P<unit>.*)", re.DOTALL
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ATTACHED = re.compile(r"[A-Za-z]")

# A number in prose. The lookbehind excludes parts of `x2` and `1.2.3`.
_SAID = re.compile(
    r"(?<![\w.])(?:[-\u2212]\s?)?(?:\\?[$\u00a3\u20ac]\s?)?[-\u2212]?"
    rf"(?:(?:{_INT})(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:\s?/\s?[0-9]+|e[+-]?[0-9]{{1,3}}(?![0-9A-Za-z]))?",
    re.ASCII,
)
_SENTENCE_END = re.compile(r"\n|[\u3002\uff0e]|(?:\.|(?<![0-9])!)(?=\s+[^a-z\s]|\s*$)|\?")
_CLAUSE = re.compile(r"[,;:=.!?\n]|[0-9]")
_JOINED_BEFORE = re.compile(
    r"(?:[-\u2212+/^<>~!|(\[\u2248\u2260\u2264\u2265]|(?<!\*)\*|\\[a-z]+)\s*\{?\s*$"
)
_JOINED_AFTER = re.compile(
    r"[,.]?[0-9]|[_^!'\u00b2\u00b3]|\s*(?:[+*^=<>]\s*[\w\\]|[-/]\s*(?:[0-9\\(]|[A-Za-z](?![a-z]))|\\[a-z])"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number and its mark: "", `%`, `^\\circ` or `'`."""

    value: Fraction
    mark: str


@dataclass(frozen=True, slots=True)
class NumberSpan:
    """A number in a text, its spelling, and its end position."""

    numeral: Number
    text: str
    end: int


def read_numeral(text: str, asked: str = "", is_reference: bool = False) -> Number | None:
    """The number that `text` represents, or None. A unit is a noun, or a multiplier that the
    question has (`asked`, from `wording.asked_in`). The caller must check `Number.mark`. Unless
    `is_reference`, `text` may also be an equation whose right side is the number (`m+n = 42`)."""
    if len(text) > MAX_CHARACTERS:
        return None
    cleaned = clean(text)
    number = _read_one(cleaned, asked)
    value = value_side(cleaned, asked) if number is None and not is_reference else None
    return number if value is None else _read_one(value, asked)


def _read_one(cleaned: str, asked: str) -> Number | None:
    rounded = _APPROXIMATELY.fullmatch(cleaned)
    match = _NUMERAL.fullmatch(cleaned if rounded is None else rounded[1])
    if match is None or (match["sign"] and match["sign2"]):
        return None
    if match["words"] and changes_value(_TEXT.sub(r"\1", f"{match['words']} is")):
        return None
    value = _value_of(match)
    if value is None:
        return None
    decoration = _DECORATION.fullmatch(match["rest"])
    assert decoration is not None
    attached = _ATTACHED.match(match["rest"]) is not None
    if not is_unit(decoration["unit"], attached, asked):
        return None
    value = -value if "-" in (match["sign"], match["sign2"]) else value
    if rounded is not None and not _rounds_to(value, Fraction(rounded[2]), len(rounded[3] or "")):
        return None
    return Number(value, decoration["mark"] or "")


def _rounds_to(value: Fraction, other: Fraction, decimals: int) -> bool:
    return value.denominator > 1 and abs(value - other) * 10**decimals <= Fraction(1, 2)


def last_numeral_said(text: str, asked: str = "", only: bool = False) -> NumberSpan | None:
    """The last number of a text; None if there is no number, or if the words or signs next to the
    number change the answer. With `only`, the result is also None if the sentence states anything
    besides the number."""
    matches = list(_SAID.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    before, after = text[: last.start()], text[last.end() :]
    sentence, end, follows = split_sentence(after)
    if any(map(str.isdecimal, before + sentence if only else after)):
        return None
    if _JOINED_BEFORE.search(before) or _JOINED_AFTER.match(after):
        return None
    if denies_before(before) or changes_value(since_verb(_CLAUSE.split(before)[-1]), asked):
        return None
    if end == "?" or retracts(follows) or changes_value_after(sentence, asked, in_prose=not only):
        return None
    if only and is_statement(sentence):
        return None
    attached = re.match(r"[A-Za-z]+", after)
    if attached is not None and not is_unit(attached.group(), attached=True, asked=asked):
        return None
    numeral = read_numeral(last.group())
    mark = "%" if after.lstrip(" \\").startswith("%") else ""
    return (
        None
        if numeral is None
        else NumberSpan(Number(numeral.value, mark), last.group() + mark, last.end())
    )


def split_sentence(text: str) -> tuple[str, str, str]:
    """The first sentence of a text, its end mark, and the rest."""
    end = _SENTENCE_END.search(text)
    if end is None:
        return text, "", ""
    return text[: end.start()], end.group(), text[end.end() :]


def _value_of(match: re.Match[str]) -> Fraction | None:
    def read(name: str) -> Fraction:
        digits = match[name] or match.groupdict().get(f"{name}1") or ""
        return Fraction(digits.replace(",", "").replace(" ", ""))

    if match["number"] is not None:
        bottom = read("denominator") if match["denominator"] else Fraction(1)
        return read("number") / bottom if bottom else None
    if match["period"] is not None:
        digits, period = match["start"], match["period"]
        start = Fraction(int(digits or 0), 10 ** len(digits))
        tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))
        return int(match["before"] or 0) + start + tail
    if match["exponent"] or match["exponent1"]:
        exponent = int(read("exponent"))
        if match["factor"] is None:
            return None if exponent in (0, 1) else Fraction(10) ** exponent  # 10^1 is 10
        return read("factor") * Fraction(10) ** exponent
    if match["mantissa"] is not None:
        power = int(match["power"])
        return Fraction(match["mantissa"]) * Fraction(10) ** power if power else None
    if match["units"] is not None:
        part, parts = int(match["part"]), int(match["parts"])
        return int(match["units"]) + Fraction(part, parts) if 0 < part < parts else None
    under = read("under")
    if not under:
        return None
    return (read("whole") if match["whole"] else 0) + read("over") / under
