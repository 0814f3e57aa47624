"""Reads answers that are no expressions: words, dates and times, choices, numbers in another base,
remainders. The arguments of all functions must be texts in normal form (`normal_form.clean`)."""

from __future__ import annotations

import re

from rloo.addons.graders.math.normal_form import is_balanced
from rloo.addons.graders.math.wording import changes_value, words_of

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\(?\s*[A-Za-z](?:[A-Za-z' -]{0,40})\s*\)?")
_CHINESE = re.compile(r"[\u4e00-\u9fff]{1,20}")
_DATED = re.compile(r"[A-Za-z0-9][A-Za-z0-9:.,' -]{0,60}")
_ARTICLE = re.compile(r"^(?:an?|the)\s+(?=[a-z]{2})")
_MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december"
_NAMED = re.compile(r"([A-Za-z]|[A-Z]{2})\s*=([^=<>]+)")
_NAMED_TUPLE = re.compile(r"\(([a-z](?:,\s*[a-z])+)\)\s*=\s*\((.*)\)")
_LETTERS = re.compile(r"[A-J]{2,6}")
_MATHS = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "and", "the"])
_CHOICE = re.compile(
    r"(?i:(?:the )?(?:option|choice|answer)\s*:?\s*)?"
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
_BOTH = re.compile(r"\\text\s*\{\s*and\s*\}")
_REAL = r"(?:\\mathbb\s*\{\s*R\s*\}|\\R(?![A-Za-z]))"
_REALS = re.compile(rf"(?:[a-z]\s*\\in\s*)?{_REAL}")
_OTHER_THAN = re.compile(
    rf"[a-z]\s*\\ne\s*(?P<value>[^<>=]+)"
    rf"|(?:[a-z]\s*\\in\s*)?{_REAL}\s*(?:\\setminus|\\backslash|-)\s*\\\{{(?P<item>[^{{}}<>=]+)\\\}}"
)
_TURNED = {">": "<", "\\ge": "\\le"}
_VARIABLE = re.compile(r"[a-z]")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\cup|\\vee|\\lor")


def read_words(text: str) -> str | None:
    r"""The words of an answer in lower case: one letter (a name), `\text{...}`, words, a date or a
    time of day."""
    plain = _TEXT.sub(r"\1", text).strip(" .")
    if _CHINESE.fullmatch(plain):
        return plain
    if _WORDS.fullmatch(plain) is None:
        return _read_date(plain)
    words = " ".join(_ARTICLE.sub("", plain.strip("() ").casefold()).split())
    words = re.sub(r"\bsolutions$", "solution", words)
    if "-" in words and not re.search(r"[a-z]{2}", words):  # p - q
        return None
    return None if len(words) == 2 and plain == text else words


def _read_date(plain: str) -> str | None:
    if _DATED.fullmatch(plain) is None or not any(map(str.isdecimal, plain)):
        return None
    plain = " ".join(plain.split())
    lower = re.sub(r"\b([ap])\s*\.?\s*m\b\.?", r"\1m", plain.lower())
    lower = re.sub(rf"\b([0-9]{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTHS})\b", r"\2 \1", lower)
    lower = re.sub(r"(?<=[0-9])(?:st|nd|rd|th)\b", "", lower)
    words = set(words_of(lower))
    if not any(len(word) > 2 or word in ("am", "pm") for word in words) or _MATHS & words:
        return None
    apart = re.sub(r"(?<=[0-9])(?=[ap]m)", " ", lower)
    return " ".join(re.sub(r"[,.](?![0-9])", " ", apart).split())


def read_choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice as a capital, and the text after it. None for other texts, for example
    if the text after the letter names another choice."""
    plain = _TEXT.sub(r" \1 ", text).strip(" *")
    found = _CHOICE.fullmatch(plain)
    if found is None:
        return None
    rest = found[3].strip(" .:")
    if (
        _OTHER_CHOICE.search(rest)
        or changes_value(rest)
        or (found[1] is None and found[2] + rest == "")
    ):
        return None
    return found[1] or found[2], rest


def read_letters(text: str) -> frozenset[str] | None:
    """The letters of several choices, `ABD` or `A, B and D`; None for anything else."""
    plain = re.sub(r"[\s,;()]|\band\b", "", _TEXT.sub(r" \1 ", text))
    found = frozenset(plain)
    return found if _LETTERS.fullmatch(plain) and len(found) == len(plain) else None


def read_based(text: str) -> tuple[str, int] | None:
    """The digits and the base of a number whose base is given."""
    found = _BASED.fullmatch(_TEXT.sub(r"\1", text).strip())
    if found is None:
        return None
    digits = re.sub("[, ]", "", found[1]).lstrip("0") or "0"
    base = _BASES.get(found[2]) or int(found[2])
    is_number = any(map(str.isdecimal, digits)) or len(digits) > 1
    return (digits, base) if is_number else None


def read_remainder(text: str) -> tuple[int, frozenset[int]] | None:
    r"""The modulus and the remainders of `x \\equiv 3 \\pmod{7}`; None if a remainder is not
    smaller than the modulus."""
    found = _REMAINDER.fullmatch(_TEXT.sub(r"\1", text).strip())
    if found is None or not (modulus := int(found[3])):
        return None
    values = [int(value) for value in re.findall("-?[0-9]+", found[2])]
    if any(abs(value) >= modulus for value in values):
        return None
    return modulus, frozenset(value % modulus for value in values)


def is_conjunction(text: str) -> bool:
    """Whether two statements are joined by `and`."""
    return _BOTH.search(text) is not None


def as_intervals(text: str) -> str | None:
    r"""The intervals of inequalities of one variable, as `(-\infty,2]` for `x \le 2`; None for
    anything else."""
    other = _OTHER_THAN.fullmatch(text)
    if other is not None:
        value = other["value"] or other["item"]
        return rf"(-\infty,{value})\cup ({value},\infty)" if "," not in value else None
    if _REALS.fullmatch(text):
        return r"(-\infty,\infty)"
    found = [_as_interval(item.strip()) for item in _OR.split(text)]
    known = [one for one in found if one is not None]
    if len(known) < len(found) or len({name for name, _ in known}) != 1:
        return None
    return r"\cup ".join(interval for _, interval in known)


def _as_interval(text: str) -> tuple[str, str] | None:
    both = [_as_interval(half) for half in _BOTH.split(text)] if _BOTH.search(text) else []
    if len(both) == 2 and both[0] and both[1] and both[0][0] == both[1][0]:
        return _intersection(both[0][1], both[1][1], both[0][0])
    sides = [side.strip() for side in _RELATION.split(text)]
    signs = _RELATION.findall(text)
    if "," in text or not all(sides) or len(signs) not in (1, 2):
        return None
    if signs[0] in _TURNED:  # descending order
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


def _intersection(one: str, other: str, name: str) -> tuple[str, str] | None:
    """The intersection of two half lines, one with an upper bound and one with a lower bound."""
    low = [text for text in (one, other) if text.endswith(r",\infty)")]
    high = [text for text in (one, other) if text.startswith(r"(-\infty,")]
    if len(low) != 1 or len(high) != 1 or low == high:
        return None
    return name, low[0].removesuffix(r"\infty)") + high[0].removeprefix(r"(-\infty,")


def names_of(text: str) -> tuple[str, ...]:
    """The names of a text's named values in order; () if the text has none."""
    return tuple(_named_values(text)[0])


def as_tuples(text: str, names: tuple[str, ...] = ()) -> str:
    """Named values, `y = 3, x = -1`, as tuples in the order of `names`, or in alphabetic order if
    the names differ. `text` itself if a value has no name, or if a group repeats a name."""
    groups = _named_values(text)
    order = names if set(names) == set(groups[0]) else sorted(groups[0])
    tuples = [f"({','.join(group[name] for name in order)})" for group in groups]
    return ", ".join(tuples) if groups[0] else text


def _named_values(text: str) -> list[dict[str, str]]:
    """The groups of named values in a text; one empty group if there are none."""
    together = _NAMED_TUPLE.fullmatch(text)
    if together is not None and is_balanced(together[2]):
        names, values = together[1].split(","), split_items(together[2])
        items = list(zip(names, values, strict=False)) if len(names) == len(values) else []
    else:
        found = [_NAMED.fullmatch(item.strip()) for item in split_items(text)]
        items = [(one[1], one[2]) for one in found if one is not None]
        items = items if len(items) == len(found) else []
    groups: list[dict[str, str]] = [{}]
    for name, value in items:
        if name.strip() in groups[-1]:
            groups.append({})
        groups[-1][name.strip()] = value.strip()
    is_named = len(groups[0]) > 1 and all(set(group) == set(groups[0]) for group in groups)
    return groups if is_named else [{}]


def split_items(text: str) -> list[str]:
    """The items of a list, split at commas, semicolons and `and` outside brackets."""
    items, depth = [""], 0
    for part in re.split(r"(\\text\s*\{\s*and\s*\}|\\[{}]|[,;(){}\[\]])", text):
        depth += part in ("(", "{", "[", "\\{")
        depth -= part in (")", "}", "]", "\\}")
        if depth == 0 and (part in (",", ";") or "and" in part):
            items.append("")
        else:
            items[-1] += part
    return [item for item in items if item.strip()]
