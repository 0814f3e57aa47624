"""The verifiable rewards of GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"), whose references are worked solutions that end with `#### 42`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rloo.rewards.numerals import Numeral, last_numeral_said, read_numeral, split_sentence
from rloo.rewards.text import question_of, text_of
from rloo.rewards.wording import asked_in, asks_for, boxed_answer, takes_back
from rloo.types import Text

_MARK = "####"
_LAST_CHARACTERS = 1000
_ANSWER_IS = re.compile(r"answer is\b", re.IGNORECASE)
_FINAL_LINE = re.compile(r" -?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?\s*")


def gsm8k_reward(
    completions: Sequence[Text],
    answer: Sequence[str | float | None],
    prompts: Sequence[Text] | None = None,
) -> list[float | None]:
    r"""1.0 if the completion's final number equals the reference, else 0.0.

    The final number is the one after the last `####`; without that mark, the one in the last
    `\boxed{}`; without a box, the one in the sentence after the last "answer is"; failing all of
    these, the last number of the text. After the mark and in a box there must be nothing but the
    number, as `rloo.rewards.numerals` reads it; in a sentence no word or sign beside it may say
    that the answer is another one. A percent sign counts where the reference has one or the
    question asks for a percentage. Numbers are compared exactly. The reward is None where the
    reference is None. Raises ValueError for a reference that is no number after its `####` (or,
    without that mark, in its whole text).
    """
    wanted = [_read_reference(reference, row) for row, reference in enumerate(answer)]
    questions = [""] * len(completions) if prompts is None else map(question_of, prompts)
    return [
        None if number is None else float(_is_right(text_of(text), number, str(given), question))
        for text, number, given, question in zip(
            completions, wanted, answer, questions, strict=True
        )
    ]


def _is_right(text: str, wanted: Numeral, reference: str, question: str) -> bool:
    found = _final_number(text, asked_in(question, reference.rpartition(_MARK)[2]))
    if found is None or found.value != wanted.value:
        return False
    return found.mark in ("", wanted.mark) or asks_for(found.mark, question)


def gsm8k_format_reward(completions: Sequence[Text]) -> list[float]:
    """1.0 if the last line is `#### <number>` and contains the only `####`, else 0.0."""
    return [float(_ends_with_answer(text_of(completion))) for completion in completions]


def _final_number(text: str, asked: str) -> Numeral | None:
    if _MARK in text:
        return read_numeral(text.rpartition(_MARK)[2], asked)
    boxed = boxed_answer(text)
    if boxed is not None:
        return read_numeral(boxed, asked)
    *_, after = _ANSWER_IS.split(text)
    if after == text:
        said = last_numeral_said(text[-_LAST_CHARACTERS:], asked)
        return None if said is None else said.numeral
    sentence, end, follows = split_sentence(after.lstrip(" :*\n\t"))
    if end == "?" or takes_back(follows):
        return None
    said = last_numeral_said(sentence, asked, only=True)
    return read_numeral(sentence, asked) or (None if said is None else said.numeral)


def _read_reference(reference: str | float | None, row: int) -> Numeral | None:
    if reference is None:
        return None
    written = str(reference).rpartition(_MARK)[2]
    number = read_numeral(written, asked_in("", written))
    if number is None:
        raise ValueError(
            f"the GSM8K answer of row {row} is {reference!r}; a reference needs exactly one "
            f"number, after {_MARK} where it has that mark (column 'answer')"
        )
    return number


def _ends_with_answer(text: str) -> bool:
    before, _, after = text.rpartition(_MARK)
    return (
        text.count(_MARK) == 1
        and (before == "" or before.endswith("\n"))
        and _FINAL_LINE.fullmatch(after) is not None
        and read_numeral(after) is not None
    )
