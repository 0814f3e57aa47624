"""Reading a completion: its text, its last box, its number. Hostile text is read with linear-time
patterns and exact fractions, and never evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

from rloo.types import Text

_BOX = "\\boxed{"
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# ASCII digits only, so that a digit of another script counts as stray text. The guards on both
# sides prevent parts of `x2`, `1.2.3` and `2^10` from being read as numbers.
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>[-\u2212]\s?)?(?:\\?[$\u00a3\u20ac]\s?)?"
    r"(?P<value>[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?![0-9^\u00b2\u00b3])"
    r"(?:\s?/\s?(?P<denominator>[0-9]+))?"
)
_MAX_DIGITS = 40


def text_of(completion: Text) -> str:
    """The text of a completion: the string itself, or the last assistant message's content, its
    text parts joined; empty without such a message, and for one without text (a tool call)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message.get("role") == "assistant":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or "" for part in content)
    return ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`: None without a box, empty if it is not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for position in range(start, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[start:position]
    return ""


def only_number(text: str) -> Fraction | None:
    """The only number in `text`, exactly; None if there is none, several, or a stray digit.

    It may have a sign, currency, thousands commas or decimals, or be `3/4` or `\\frac{3}{4}`.
    Words, units and a percent sign around it are ignored: "about $1,200.50 per week." is 2401/2.
    """
    text = _simplify(text)
    match = _NUMBER.search(text)
    if match is None:
        return None
    rest = text[: match.start()] + text[match.end() :]
    return None if any(character.isdecimal() for character in rest) else _value_of(match)


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly, in the notations of `only_number`; None without one."""
    matches = list(_NUMBER.finditer(_simplify(text)))
    return _value_of(matches[-1]) if matches else None


def _simplify(text: str) -> str:
    return _LATEX_FRACTION.sub(r"\1/\2", text).replace("{,}", ",")


def _value_of(match: re.Match[str]) -> Fraction | None:
    value, denominator = match["value"].replace(",", ""), match["denominator"] or "1"
    # Python refuses to parse thousands of digits, and no answer has that many.
    if len(value) > _MAX_DIGITS or len(denominator) > _MAX_DIGITS or int(denominator) == 0:
        return None
    return Fraction(value) / int(denominator) * (-1 if match["sign"] else 1)
