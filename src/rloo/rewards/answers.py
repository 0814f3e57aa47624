"""Whether an answer is the reference: numbers and words are compared here, other forms are only
admitted to be judged."""

from __future__ import annotations

import re

from rloo.rewards.closed_form import Form, NoForm, read_form
from rloo.rewards.numerals import Numeral, clean, read_numeral
from rloo.rewards.wording import alters, asked_in, asks_for

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"\(?\s*[A-Za-z](?:[A-Za-z' -]{0,40})\s*\)?")
_NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?"
_LABEL = re.compile(
    rf"(?P<before>^|,|;|\\text\s*\{{\s*(?:or|and),?\s*\}})\s*"
    rf"(?:{_NAME}|\([a-z](?:,\s*[a-z])+\)|\\text\s*\{{(?P<words>[A-Za-z' ]*)\}})\s*"
    r"(?P<relation>=|:|\\in(?![A-Za-z]))(?!=)"
)


class Reference:
    """A reference answer, and the marks (percent, degree) that its question asks for."""

    def __init__(self, text: str, question: str = "") -> None:
        self._text = clean(text)
        self._question = question
        self._asked = asked_in(question, text)
        self._numeral = read_numeral(text, self._asked)
        self._words = _read_words(self._text)
        self._form = None
        self.is_readable = bool(self._text)
        if self._numeral is None and self._words is None and self.is_readable:
            try:
                self._form = read_form(self._text)
            except NoForm:
                self.is_readable = False

    def judge(self, answer: str) -> bool | tuple[str, str]:
        """Whether `answer` is this reference; the LaTeX of both where only its form is known to be
        right."""
        if self._numeral is not None:
            return self._is_number(read_numeral(answer, self._asked))
        if self._words is not None:
            return _read_words(clean(answer)) == self._words
        assert self._form is not None
        # Without the name that it is given, as in `x = ...`, unless the reference has one.
        latex = _LABEL.sub(self._without_label, clean(answer).replace("%", "\\%"))
        try:
            form = read_form(latex)
        except NoForm:
            return False
        form.parts -= {
            f"mark {mark}" for mark in ("%", "^\\circ") if asks_for(mark, self._question)
        }
        brackets = form.brackets_for(self._form)
        if brackets is None or not form.is_within(self._form):
            return False
        return self._in_brackets(self._text.replace("%", "\\%"), self._form, brackets), (
            self._in_brackets(latex, form, brackets)
        )

    @staticmethod
    def _in_brackets(latex: str, form: Form, brackets: str) -> str:
        # A bare list is a set for a judge, without order.
        return f"$({latex})$" if brackets == "()" and "bare" in form.lists else f"${latex}$"

    def _without_label(self, label: re.Match[str]) -> str:
        words = label["words"]
        is_kept = label["relation"] in self._text or (words and alters(f"{words} is"))
        return label.group() if is_kept else label["before"]

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


def _read_words(text: str) -> str | None:
    """The words that an answer is: one letter (a choice, a name), `\\text{...}`, or whole words."""
    plain = _TEXT.sub(r"\1", text).strip()
    if _WORDS.fullmatch(plain) is None:
        return None
    words = " ".join(plain.strip("() ").casefold().split())
    return None if len(words) == 2 and plain == text else words
