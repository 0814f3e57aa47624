"""Compares an answer with the reference. This module compares numbers, words, choices, numbers with
a base, and remainders. For other expressions it only checks the form; math-verify compares the
values."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rloo.addons.graders.math.equation_sides import value_side
from rloo.addons.graders.math.expression_form import parse_form
from rloo.addons.graders.math.expression_tree import ExpressionForm, UnparsableExpression
from rloo.addons.graders.math.normal_form import clean
from rloo.addons.graders.math.numbers import MAX_CHARACTERS, Number, read_numeral
from rloo.addons.graders.math.special_answers import (
    as_intervals,
    as_tuples,
    is_conjunction,
    names_of,
    read_based,
    read_choice,
    read_letters,
    read_remainder,
    read_words,
)
from rloo.addons.graders.math.wording import asked_in, asks_for, changes_value, is_unit

_NAME = r"[A-Za-z](?:_\{?\w+\}?)?(?:\(\w+\))?"
_LABEL = re.compile(
    rf"(?P<before>^|,|;|\\text\s*\{{\s*(?:or|and),?\s*\}})\s*"
    rf"(?:{_NAME}|\([a-z](?:,\s*[a-z])+\)|\\text\s*\{{(?P<words>[A-Za-z' ]*)\}})\s*"
    r"(?P<relation>=|:|\\in(?![A-Za-z]))(?!=)"
)
_UNIT = re.compile(r"\\text\s*\{(?!\s*(?:and|or)\b)([^{}]*)\}(?:\s*\^\s*(?:\{\s*[23]\s*\}|[23]))?")
_ITEMS = re.compile(r"[,;]|\\text\s*\{\s*(?:and|or),?\s*\}")
_LONG_WORD = re.compile(
    r"(?<![A-Za-z\\])(?!sin|cos|tan|log|exp|sqrt|and\b|or\b|pi\b|ln\b)[A-Za-z]{2,}"
)
_APPROXIMATELY = r"\approx"
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SYMBOL = re.compile(r"\\?[A-Za-z]+")
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_COUNTS = {word: number for number, word in enumerate(_WORDS.split())}
_OF_INTERVALS = re.compile(r"(?<=[)\]])\s*\\text\s*\{\s*or\s*\}\s*(?=[(\[])")
_CHOICE_ALONE = re.compile(r"\W*\(?[A-J]\)?\W*")
_NOTHING_READ = (None,) * 6


class ReferenceAnswer:
    """A reference answer. Its question determines which marks (percent, degree) an answer may
    have."""

    def __init__(self, text: str, question: str = "") -> None:
        cleaned = clean(text) if len(text) <= MAX_CHARACTERS else ""
        self._names = names_of(cleaned)
        self._text = as_tuples(cleaned, self._names)
        self._question = question
        self._asked = asked_in(question, text)
        self._form = self._value = None
        self._numeral = read_numeral(text, self._asked, is_reference=True)
        self._choice = None if self._numeral else read_choice(self._text)
        self._words = read_words(self._text)
        self._based = read_based(self._text)
        self._remainder = read_remainder(self._text)
        if self._choice is not None and self._choice[1]:
            self._value = ReferenceAnswer(self._choice[1], question)
        self._letters = read_letters(self._text)
        known = (
            self._numeral,
            self._letters,
            self._choice,
            self._words,
            self._based,
            self._remainder,
        )
        self.is_readable: bool = bool(self._text)
        if known == _NOTHING_READ and self.is_readable:
            try:
                self._form = parse_form(self._text)
            except UnparsableExpression:
                self.is_readable = False

    def judge(self, answer: str) -> bool | tuple[str, str]:
        """Whether `answer` equals this reference. If only the form of `answer` could be checked,
        the result is (reference, answer) as LaTeX for math-verify."""
        cleaned = clean(answer)
        if self._numeral is not None:
            return self._is_number(cleaned)
        if self._choice is not None:
            return self._is_choice(answer, cleaned)
        if self._words is not None or self._letters is not None:
            return self._is_worded(cleaned)
        if self._based is not None:
            return self._is_based(cleaned)
        if self._remainder is not None:
            return read_remainder(cleaned) == self._remainder
        return self._is_form(cleaned)

    def _is_form(self, answer: str) -> bool | tuple[str, str]:
        assert self._form is not None
        # Remove a label, as in `x = ...`, unless the reference has a label.
        latex = _LABEL.sub(self._without_label, as_tuples(answer, self._names).replace("%", "\\%"))
        if any(part.startswith("relation") for part in self._form.parts):
            return self._is_one_form(latex)
        latex, sign, decimals = latex.partition(_APPROXIMATELY)
        verdict = self._is_one_form(value_side(latex, self._asked) or latex)
        if not sign or not verdict:
            return verdict
        # A symbol followed by its decimals (pi and 3.14) is no result.
        if self._form.lists or _SYMBOL.fullmatch(self._text) or not read_numeral(decimals):
            return False
        texts = verdict if isinstance(verdict, tuple) else (f"${self._text}$",) * 2
        return texts[0], f"{texts[1]}\n{_APPROXIMATELY}{clean(decimals)}"

    def _is_one_form(self, latex: str) -> bool | tuple[str, str]:
        assert self._form is not None
        if "\\cup" in self._form.parts:
            latex = _OF_INTERVALS.sub(r"\\cup ", latex)
        try:
            form, wanted, latex, reference = self._alike(latex)
        except UnparsableExpression:
            return False
        if "relation =" in wanted.parts - form.parts and not _is_named(reference):
            return False
        form.parts -= {
            f"mark {mark}" for mark in ("%", "^\\circ") if asks_for(mark, self._question)
        }
        brackets = form.brackets_for(wanted)
        if brackets is None or not (form.is_within(wanted) and form.has_items_of(wanted)):
            return False
        if form.lists == wanted.lists == {"bare"}:
            numbers = [_numbers_of(text, self._asked) for text in (latex, reference)]
            if None not in numbers:
                return numbers[0] == numbers[1]
        if _APPROXIMATELY in latex and not self._is_rounded_alike(latex):
            return False
        texts = _for_judge(reference, wanted, brackets), _for_judge(latex, form, brackets)
        return texts[0].replace(" ", "") == texts[1].replace(" ", "") or texts

    def _is_rounded_alike(self, latex: str) -> bool:
        """Whether answer and reference end with equal decimals, since math-verify ignores them."""
        ends = [text.rpartition(_APPROXIMATELY)[2] for text in (latex, self._text)]
        return read_numeral(ends[0]) == read_numeral(ends[1])

    def _alike(self, latex: str) -> tuple[ExpressionForm, ExpressionForm, str, str]:
        """The forms and texts of the answer and the reference. If one has intervals and the other
        inequalities, both become intervals."""
        assert self._form is not None
        reference, form = self._text.replace("%", "\\%"), parse_form(latex)
        intervals = [as_intervals(text) for text in (latex, reference)]
        other = self._form if intervals[0] else form
        if None not in intervals and is_conjunction(latex) != is_conjunction(reference):
            latex, reference = str(intervals[0]), str(intervals[1])
            return parse_form(latex), parse_form(reference), latex, reference
        if None in intervals and intervals != [None, None] and not other.has_inequality:
            latex, reference = intervals[0] or latex, intervals[1] or reference
            return parse_form(latex), parse_form(reference), latex, reference
        return form, self._form, latex, reference

    def _without_label(self, label: re.Match[str]) -> str:
        words, relation = label["words"], label["relation"]
        named = re.search(rf"{re.escape(relation)}(?![A-Za-z])", self._text) is not None
        is_kept = named or (words and changes_value(f"{words} is"))
        return label.group() if is_kept else label["before"]

    def _is_number(self, cleaned: str) -> bool:
        wanted, answer = self._numeral, read_numeral(cleaned, self._asked)
        assert wanted is not None
        if answer is None:
            choice = read_choice(cleaned)  # (B) 42
            answer = read_numeral(choice[1], self._asked) if choice and choice[1] else None
        if answer is None:
            return False
        if answer.mark not in ("", wanted.mark) and not asks_for(answer.mark, self._question):
            return False
        if wanted.mark == "%" and answer.mark == "":  # for 50%, both 50 and 1/2 are correct
            return answer.value in (wanted.value, wanted.value / 100)
        return answer.value == wanted.value

    def _is_choice(self, answer: str, cleaned: str) -> bool | tuple[str, str]:
        assert self._choice is not None
        choice = read_choice(cleaned)
        if choice is None:
            return False if self._value is None else self._value.judge(answer)
        if choice[0] != self._choice[0] or self._value is None or not choice[1]:
            return choice[0] == self._choice[0]
        return self._value.judge(choice[1])

    def _is_worded(self, cleaned: str) -> bool:
        if self._letters is not None and read_letters(cleaned) == self._letters:
            return True
        said = read_numeral(cleaned, self._asked) if self._words in _COUNTS else None
        if said is not None:
            return not said.mark and said.value == _COUNTS[str(self._words)]
        return self._words is not None and read_words(cleaned) == self._words

    def _is_based(self, cleaned: str) -> bool:
        assert self._based is not None
        label = _LABEL.match(cleaned)
        bare = cleaned[label.end() :].strip() if label else cleaned
        based = read_based(bare)
        if based is None and re.search(r"\bbase\b|binary|octal|hexadecimal", self._question, re.I):
            return bare.replace(",", "").replace(" ", "").lstrip("0") == self._based[0]
        return based == self._based


def _is_named(equation: str) -> bool:
    """Whether an equation's left side is a name of its right side (`y`, `f(x)`, `|AB|`). In an
    equation of unknowns, `x+y` is no name."""
    has_name = value_side(equation) is not None and not re.search(
        "[a-z]", _COMMAND.sub("", equation.partition("=")[0])
    )
    return has_name or _LABEL.match(equation) is not None


def _for_judge(latex: str, form: ExpressionForm, brackets: str) -> str:
    """An expression prepared for math-verify: without units, and with i in a form that math-verify
    recognises."""
    latex = _UNIT.sub(lambda unit: "" if is_unit(unit[1]) else unit[0], latex)
    latex = re.sub(r"(?<=[0-9])i(?![A-Za-z])", " i", latex.replace(r"^\circ", ""))
    # math-verify parses a list without brackets as a set, without order.
    return f"$({latex})$" if brackets == "()" and "bare" in form.lists else f"${latex}$"


def references_of(given: Any) -> list[str]:
    """The accepted answers in a value of the column `answer`: a single text, or the items of a
    list."""
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, dict)):
        return [str(one) for one in given if one is not None]
    return [] if given is None else [str(given)]


def is_plain(text: str) -> bool:
    """Whether a text is only an answer without words around it: a number, a choice or an
    expression."""
    if len(text) > MAX_CHARACTERS:
        return False
    cleaned = clean(text)
    if read_numeral(text) is not None or _CHOICE_ALONE.fullmatch(text) or read_letters(cleaned):
        return True
    words = re.sub(r"\\text\s*\{\s*(?:and|or)?,?\s*\}|\\(?:begin|end)\s*\{\w+\}", " ", cleaned)
    if _LONG_WORD.search(words.replace("\\text", "")) or not re.search(r"[0-9\\]", cleaned):
        return False
    try:
        parse_form(cleaned)
    except UnparsableExpression:
        return read_remainder(cleaned) is not None
    return True


def _numbers_of(text: str, asked: str) -> Counter[Number] | None:
    """The numbers of a list without brackets, with their counts. None if an item is no number."""
    read = [read_numeral(item, asked) for item in _ITEMS.split(text) if item.strip()]
    numbers = [number for number in read if number is not None and not number.mark]
    return Counter(numbers) if len(numbers) == len(read) else None
