r"""The sides of an answer that is an equation: `m+n = 42`, `6 \cdot 7 = 42`, `V = r^2 h = 12`.

An answer may be preceded by its name; in a sentence, also by the steps of its calculation.
"""

from __future__ import annotations

import re

from rloo.addons.graders.math.normal_form import clean
from rloo.addons.graders.math.wording import changes_value

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z' ]{2,60}")
_OTHER = re.compile(
    r"[,;:?<>%]|\\(?:ne|le|ge|approx|in|sim|equiv|cong|to|pm|mp|cup|cap|iff|implies|text)(?![A-Za-z])"
)
_OPERATION = re.compile(r"(?<=.)[-+*/^!(]|\\[a-z]+")
_LONG = re.compile(r"(?<![A-Za-z\\])[a-z]{2,}")
_INNER = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}")
# A number in an index, an exponent or an argument is no coefficient.
_INDEX = re.compile(r"[_^]\s*(?:\{[^{}]*\}|-?\w)|(?<=[A-Za-z}])\([^()]*\)")
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|varphi|omega)(?![A-Za-z])"
)
_NAME = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|(?<![A-Za-z\\])[A-Z]{2,4}(?![A-Za-z])")
_MARKS = re.compile(
    r"\\(?:angle|triangle|overline|overrightarrow|Delta|left|right)(?![A-Za-z])|[|]"
)


def value_side(text: str, asked: str = "") -> str | None:
    """The right side of `m+n = 42`, if the left side is a name of the value: words, letters, or
    words of the question (`asked`). None for other texts, such as `2x = 42`, whose left side is not
    a name of 42."""
    name, _, value = text.partition("=")
    return value.strip() if value.strip() and "=" not in value and _is_name(name, asked) else None


def last_side(text: str, asked: str = "") -> str:
    """The last side of a chain such as `A = 6 \\cdot 7 = 42`, whose other sides are a name and
    steps. `text` itself if it is no such chain."""
    *sides, last = clean(text).split("=")
    if not sides or not last.strip():
        return text
    named = _is_name(sides[0], asked)
    steps = sides[1:] if named else sides
    is_work = bool(steps) and all(
        any(map(str.isdecimal, side))
        and _OPERATION.search(side.strip()) is not None
        and not _OTHER.search(_INNER.sub("", side))
        and not changes_value(" ".join(_LONG.findall(side)))
        and (named or not _names_of(side))
        for side in steps
    )
    return last.strip() if is_work else text


def _is_name(side: str, asked: str) -> bool:
    """Whether a side is a name of the other side: words, letters, or words of the question."""
    words = _TEXT.sub(r" \1 ", side).strip()
    if _WORDS.fullmatch(words) and not _names_of(words):
        return not changes_value(f"{words} is")
    bare = "".join(side.split())
    if bare and not bare.isdecimal() and bare in "".join(asked.split()):
        return True
    if changes_value(" ".join(_LONG.findall(side))):
        return False
    plain = _INDEX.sub("", _INDEX.sub("", _MARKS.sub("", side)))
    if _OTHER.search(plain) or any(map(str.isdecimal, plain)):
        return False
    return bool(_names_of(plain))


def _names_of(text: str) -> list[str]:
    return _NAME.findall(_GREEK.sub("x", _MARKS.sub(" ", text)))
