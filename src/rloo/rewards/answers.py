"""Whether an answer is the reference: numbers and words are compared here, other forms are only
admitted to be judged."""

from __future__ import annotations

import re

from rloo.rewards.closed_form import NoForm, read_form
from rloo.rewards.numerals import Numeral, clean, read_numeral

_PERCENT = re.compile(r"percent|%")
_DEGREE = re.compile(r"degree|angle|\u00b0|\\circ")
_ASKING = re.compile(r"[^.?!]*\?")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\(?\s*[A-Za-z](?:[A-Za-z' -]{0,40})\s*\)?")
_NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?"
_LABEL = re.compile(
    rf"(?P<before>^|,|;|\\text\s*\{{\s*(?:or|and),?\s*\}})\s*"
    rf"(?:{_NAME}|\([a-z](?:,\s*[a-z])+\)|\\text\s*\{{[A-Za-z' ]*\}})\s*"
    r"(?P<relation>=|:|\\in(?![A-Za-z]))(?!=)"
)


class Reference:
    """A reference answer, and the marks (percent, degree) that its question asks for."""

    def __init__(self, text: str, question: str = "") -> None:
        self._text = clean(text)
        self._question = question
        self._numeral = read_numeral(text)
        self._words = _read_words(self._text)
        self._form = None
        self.is_readable = bool(self._text)
        if self._numeral is None and self._words is None and self.is_readable:
            try:
                self._form = read_form(self._text)
            except NoForm:
                self.is_readable = False

    def judge(self, answer: str) -> bool | None:
        """Whether `answer` is this reference; None where only its form is known to be right."""
        if self._numeral is not None:
            return self._is_number(read_numeral(answer))
        if self._words is not None:
            return _read_words(clean(answer)) == self._words
        assert self._form is not None
        try:
            form = read_form(self.latex_of(answer))
        except NoForm:
            return False
        form.parts -= {
            f"mark {mark}" for mark in ("%", "^\\circ") if asks_for(mark, self._question)
        }
        return None if form.is_within(self._form) else False

    @property
    def latex(self) -> str:
        """The reference, for a judge."""
        return self._text.replace("%", "\\%")

    def latex_of(self, answer: str) -> str:
        """`answer` for a judge: without the name that it is given, as in `x = ...` or `x \\in ...`,
        unless the reference has such a relation itself."""
        return _LABEL.sub(
            lambda label: label.group() if label["relation"] in self._text else label["before"],
            clean(answer).replace("%", "\\%"),
        )

    def _is_number(self, answer: Numeral | None) -> bool:
        wanted = self._numeral
        assert wanted is not None
        if answer is None:
            return False
        if answer.mark not in ("", wanted.mark) and not asks_for(answer.mark, self._question):
            return False
        if wanted.mark == "%" and answer.mark == "":  # 50% is 50, if it says so, and 1/2
            return answer.value in (wanted.value, wanted.value / 100)
        return answer.value == wanted.value


def asks_for(mark: str, question: str) -> bool:
    """Whether the last question of a text is for a percentage, or for degrees."""
    asked = _ASKING.findall(question)
    pattern = {"%": _PERCENT, "^\\circ": _DEGREE}.get(mark)
    return pattern is not None and pattern.search(asked[-1] if asked else "") is not None


def _read_words(text: str) -> str | None:
    """The words that an answer is: one letter (a choice, a name), `\\text{...}`, or whole words."""
    plain = _TEXT.sub(r"\1", text).strip()
    if _WORDS.fullmatch(plain) is None:
        return None
    words = " ".join(plain.strip("() ").casefold().split())
    return None if len(words) == 2 and plain == text else words
