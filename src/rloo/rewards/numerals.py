r"""Reading a number that is given as an answer: exactly, and nothing but a number.

The grammar, of plain text and LaTeX alike, is

    answer  := [label] [sign] [currency] [sign] value [unit]
    label   := a name, or a few words, before `=` or `:`; or `the (final) answer is`
    value   := 1,234.5 | 3/4 | \frac{3}{4} | 1\frac{3}{4} | 1.2 \times 10^{3} | 10^{3}
             | 0.\overline{3}
    unit    := [currency] [% | ^\circ | '] | up to five words: eggs, \text{ m}^2, miles/hour

No word of a label or a unit may change the value (not, about, at least, twice, thousand, ...),
as `rloo.rewards.wording` has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from rloo.rewards.wording import alters, alters_after, is_statement, is_unit, takes_back

MAX_CHARACTERS = 1000


_UNICODE = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": r"\pi ",
    "\u221a": r"\sqrt ", "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3", "\u221e": r"\infty ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ",
    "\u2032": "'", "\u2019": "'",
})  # fmt: skip


# Ticks and the like, with which a completion says that it is done. A cross is none of them.
_DONE = "\ufe0f\u2713\u2714\u2611\u2705\u220e\u25a0\u25a1\U0001f389\U0001f44d\U0001f4af"


def _label(text: re.Match[str]) -> str:
    return rf"\text{{{text[1]}}}{text[2] or ':'} "


_REWRITES = [
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|mbox|operatorname|unit)\s*\{",
         r"\\text{"),
        (r"\{,\}|,\\!", ","),
        (r"(?<=[0-9])\\[,!:;](?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\[,!:; ]|(?<=[0-9A-Za-z{}])~|\\q?quad(?![A-Za-z])", " "),
        (r"\\%|(?<=[0-9])\s*(?:\\text\s*\{\s*percent\s*\}|percent(?![a-z]))", "%"),
        (r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"(?<!\\)\$([^$]*)(?<!\\)\$", r"\1"),
        (r"\*\*([^*]*)\*\*|`([^`]*)`", r"\1\2"),
        (r"\\text\s*\{([^a-zA-Z{}]*)\}", r"\1"),
        (r"\\text\s*\{([A-Za-z' ]+?)\s*(?:([:=])|\bis:?)\s*\}(?=\s*[^\s=:])", _label),
        (r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln "),
        (rf"(?:\s|[{_DONE}]|\\checkmark)+$", ""),
    )
]  # fmt: skip
_WRAPPED = re.compile(
    r"\\boxed\s*\{(.*)\}|\{(.*)\}|\\\((.*)\\\)|\\\[(.*)\\\]|\\text\s*\{([^{}]*[0-9][^{}]*)\}",
    re.DOTALL,
)

_SPACED = re.compile(r"[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")
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
_CURRENCY = r"(?:\\?\$|\u00a3|\u20ac)"
_LABEL = (
    r"(?:(?P<name>[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?)\s*[=:]"
    r"|(?P<words>[A-Za-z][A-Za-z' ]{0,60}|\\text\s*\{[A-Za-z' ]{1,60}:?\s*\})\s*[=:]"
    r"|(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+|total\s+)?"
    r"(?:answer|result|total|value)\s+is\s*:?)"
)
_NUMERAL = re.compile(
    rf"(?:{_LABEL}\s*)?(?P<sign>[+-])?\s*(?:{_CURRENCY}\s*)?(?P<sign2>[+-])?\s*"
    rf"(?:{_FRACTION}|{_PERIODIC}|{_POWER}"
    rf"|(?P<number>{_NUM})(?:\s*/\s*(?P<denominator>{_NUM}))?)"
    rf"(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_DECORATION = re.compile(
    rf"\s*(?:{_CURRENCY})?\s*(?P<mark>%|\^\\circ|''?)?\s*(?P<unit>.*)", re.DOTALL
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ATTACHED = re.compile(r"[A-Za-z]")

# A number in prose. The guard keeps parts of `x2`, `1.2.3` and `2^10` from being read as numbers.
_SAID = re.compile(
    r"(?<![\w.])(?:[-\u2212]\s?)?(?:\\?[$\u00a3\u20ac]\s?)?[-\u2212]?"
    rf"(?:(?:{_INT})(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)(?:\s?/\s?[0-9]+)?",
    re.ASCII,
)
_SENTENCE_END = re.compile(r"\n|(?:\.|(?<![0-9])!)(?=\s+[^a-z\s]|\s*$)|\?")
_CLAUSE = re.compile(r"[,;:=.!?\n]|[0-9]")
_JOINED_BEFORE = re.compile(
    r"(?:[-\u2212+/^<>~!|(\[\u2248\u2260\u2264\u2265]|(?<!\*)\*|\\[a-z]+)\s*\{?\s*$"
)
_JOINED_AFTER = re.compile(
    r"[,.]?[0-9]|[_^!'\u00b2\u00b3]|\s*(?:[+*^=<>]\s*[\w\\]|[-/]\s*(?:[0-9\\(]|[A-Za-z](?![a-z]))|\\[a-z])"
)


@dataclass(frozen=True, slots=True)
class Numeral:
    """A number and how it is decorated: with nothing, `%`, `^\\circ` or `'`."""

    value: Fraction
    mark: str


@dataclass(frozen=True, slots=True)
class Said:
    """A number in a text, how it is written, and where it ends."""

    numeral: Numeral
    text: str
    end: int


def clean(text: str) -> str:
    """`text` without what only concerns its looks: spacing, sizes, delimiters, other spellings."""
    text = text.translate(_UNICODE)
    for pattern, written in _REWRITES:
        text = pattern.sub(written, text)
    text = text.strip().removesuffix(".").strip()
    for _ in range(3):
        inner = _WRAPPED.fullmatch(text)
        if inner is None or not _is_balanced(
            found := next(g for g in inner.groups() if g is not None)
        ):
            break
        text = found.strip()
    if text[:1] == "(" and text[-1:] == ")" and "," not in text and _is_balanced(text[1:-1]):
        text = text[1:-1].strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "{(") - (character in "})")
        if depth < 0:
            return False
    return depth == 0


def read_numeral(text: str, asked: str = "") -> Numeral | None:
    """The number that `text` is; None if it is anything else. Every unit is allowed that names
    something, or multiplies as the question wants it (`asked`, of `wording.asked_in`); whether the
    mark is asked for is the caller's concern."""
    if len(text) > MAX_CHARACTERS:
        return None
    match = _NUMERAL.fullmatch(clean(text))
    if match is None or (match["sign"] and match["sign2"]):
        return None
    if match["words"] and alters(_TEXT.sub(r"\1", f"{match['words']} is")):
        return None
    value = _value_of(match)
    if value is None:
        return None
    decoration = _DECORATION.fullmatch(match["rest"])
    assert decoration is not None
    attached = _ATTACHED.match(match["rest"]) is not None
    if not is_unit(decoration["unit"], attached, asked):
        return None
    negative = "-" in (match["sign"], match["sign2"])
    return Numeral(-value if negative else value, decoration["mark"] or "")


def last_numeral_said(text: str, asked: str = "", only: bool = False) -> Said | None:
    """The last number of a text; None if there is none or what stands beside it says that the
    answer is another one. With `only`, the number is all that its sentence states."""
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
    if alters(" ".join(_CLAUSE.split(before)[-1].split()[-4:]), asked):
        return None
    if end == "?" or takes_back(follows) or alters_after(sentence, asked, in_prose=not only):
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
        else Said(Numeral(numeral.value, mark), last.group() + mark, last.end())
    )


def split_sentence(text: str) -> tuple[str, str, str]:
    """A text's first sentence, the mark that ends it, and what follows."""
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
    under = read("under")
    if not under:
        return None
    return (read("whole") if match["whole"] else 0) + read("over") / under
