"""Answers that are no expression: words, dates and times, one of several choices, numbers in
another base, remainders. What these functions are given is in its normal form."""

from __future__ import annotations

import re

from rloo.rewards.wording import alters, words_of

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\(?\s*[A-Za-z](?:[A-Za-z' -]{0,40})\s*\)?")
_CHINESE = re.compile(r"[\u4e00-\u9fff]{1,20}")
_DATED = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.,' -]{0,60}")
_MATHS = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "and", "the"])
_CHOICE = re.compile(
    r"(?:(?:the )?(?:option|choice|answer)\s*:?\s*)?"
    r"(?:\(\s*([A-J])\s*\)|([A-J])(?=\s*[.):]|$)[.):]?)[.:]?\s*(.*)",
    re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"\(\s*[A-J]\s*\)|\b[A-J]\)|\b(?:or|and)\s+[A-J]\b")
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_BASED = re.compile(
    rf"\(?([0-9A-F][0-9A-F, ]*(?:\.[0-9A-F]+)?)\)?\s*(?:_\s*\{{?\s*|\(?\s*(?:in\s+)?(?=base))"
    rf"(?:base\s*)?\(?([0-9]{{1,2}}|{'|'.join(_BASES)})\)?\s*\}}?\)?"
)
_REMAINDER = re.compile(
    r"(?:([A-Za-z])\s*(?:\\equiv|=))?\s*((?:-?[0-9]+\s*,?\s*)+)"
    r"\s*\(?\s*(?:\\pmod|\\bmod|\\mod|mod)\s*\{?\s*([0-9]+)\s*\}?\s*\)?"
)
_RELATION = re.compile(r"<|>|\\[lg]e(?![A-Za-z])")
_TURNED = {">": "<", "\\ge": "\\le"}
_VARIABLE = re.compile(r"[a-z]")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\cup|\\vee|\\lor")


def read_words(text: str) -> str | None:
    r"""The words that an answer is, in lower case: one letter (a name), `\text{...}`, whole words,
    a date or a time of day."""
    plain = _TEXT.sub(r"\1", text).strip()
    if _CHINESE.fullmatch(plain):
        return plain
    if _WORDS.fullmatch(plain) is None:
        return _read_date(plain)
    words = " ".join(plain.strip("() ").casefold().split())
    return None if len(words) == 2 and plain == text else words


def _read_date(plain: str) -> str | None:
    if _DATED.fullmatch(plain) is None or not any(map(str.isdecimal, plain)):
        return None
    lower = re.sub(r"\b([ap])\s*\.?\s*m\b\.?", r"\1m", plain.lower())
    lower = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)\b", "", lower)
    words = set(words_of(lower))
    if not any(len(word) > 2 or word in ("am", "pm") for word in words) or _MATHS & words:
        return None
    apart = re.sub(r"(?<=[0-9])(?=[ap]m)", " ", lower)
    return " ".join(re.sub(r"[,.](?![0-9])", " ", apart).split())


def read_choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice in capitals, and what stands behind it, which names no other one."""
    plain = _TEXT.sub(r" \1 ", text).strip(" *")
    found = _CHOICE.fullmatch(plain)
    if found is None:
        return None
    rest = found[3].strip(" .:")
    if _OTHER_CHOICE.search(rest) or alters(rest) or (found[1] is None and found[2] + rest == ""):
        return None
    return found[1] or found[2], rest


def read_based(text: str) -> tuple[str, int] | None:
    """The digits of a number whose base is said, and the base."""
    found = _BASED.fullmatch(_TEXT.sub(r"\1", text).strip())
    if found is None:
        return None
    digits = re.sub("[, ]", "", found[1]).lstrip("0") or "0"
    base = _BASES.get(found[2]) or int(found[2])
    is_number = any(map(str.isdecimal, digits)) or len(digits) > 1
    return (digits, base) if is_number else None


def read_remainder(text: str) -> tuple[int, frozenset[int]] | None:
    r"""The modulus and the remainders of `x \\equiv 3 \\pmod{7}`; None where one is not reduced."""
    found = _REMAINDER.fullmatch(_TEXT.sub(r"\1", text).strip())
    if found is None or not (modulus := int(found[3])):
        return None
    values = [int(value) for value in re.findall("-?[0-9]+", found[2])]
    if any(abs(value) >= modulus for value in values):
        return None
    return modulus, frozenset(value % modulus for value in values)


def as_intervals(text: str) -> str | None:
    r"""The intervals that inequalities of one variable are, as `(-\infty,2]` for `x \le 2`; None
    for anything else."""
    found = [_as_interval(item.strip()) for item in _OR.split(text)]
    known = [one for one in found if one is not None]
    if len(known) < len(found) or len({name for name, _ in known}) != 1:
        return None
    return r"\cup ".join(interval for _, interval in known)


def _as_interval(text: str) -> tuple[str, str] | None:
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = _RELATION.findall(text)
    if "," in text or not all(sides) or len(signs) not in (1, 2):
        return None
    if signs[0] in _TURNED:  # from the greatest to the least
        sides, signs = sides[::-1], [_TURNED.get(sign, "") for sign in signs[::-1]]
    if not all(sign in ("<", "\\le") for sign in signs):
        return None
    if len(signs) == 1 and _VARIABLE.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(signs) == 1:
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    low, name, high = sides
    if not _VARIABLE.fullmatch(name) or _VARIABLE.fullmatch(low) or _VARIABLE.fullmatch(high):
        return None
    brackets = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return name, f"{brackets[0]}{low},{high}{brackets[1]}"
