"""Verifiable rewards for GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"). References of GSM8K are worked solutions that end with `#### 42`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rloo.addons.graders.math.answer_equality import references_of
from rloo.addons.graders.math.answer_extraction import MARK, TAGS, read_answer
from rloo.addons.graders.math.numbers import Number, read_numeral
from rloo.addons.graders.math.wording import asked_in, asks_for
from rloo.rewards.completion_text import question_of, text_of
from rloo.types import Text

_FINAL_LINE = re.compile(r" -?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?\s*")


def gsm8k_reward(
    completions: Sequence[Text],
    answer: Sequence[Any],
    prompts: Sequence[Text] | None = None,
) -> list[float | None]:
    r"""For each completion, 1.0 if its final number equals the reference, else 0.0.

    The final number is the answer that `rloo.addons.graders.math.answer_extraction` finds: in
    `<answer>` tags, in the last `\boxed{}` or on the line of the last `####`, in the sentence after
    the last "answer is", or the last number of the text. The answer must be only a number in the
    grammar of `rloo.addons.graders.math.numbers`. In a sentence, no word or sign next to the number
    may change its value. A percent sign is part of the answer if the reference has one or the
    question asks for a percentage. Numbers are compared exactly. If the reference is a list, each
    of its items is accepted. The reward is None for a reference None. Raises ValueError for a
    reference without a number after its `####` (or, without that mark, in its complete text)."""
    wanted = [_read_references(given, row) for row, given in enumerate(answer)]
    questions = [""] * len(completions) if prompts is None else map(question_of, prompts)
    return [
        float(any(_is_right(text_of(text), *one, question) for one in read)) if read else None
        for text, read, question in zip(completions, wanted, questions, strict=True)
    ]


def _check_row(row: Mapping[str, Any]) -> None:
    if "answer" in row:
        _read_references(row["answer"])


gsm8k_reward.check_row = _check_row  # type: ignore[attr-defined]
gsm8k_reward.seeks = TAGS  # type: ignore[attr-defined]


def _is_right(text: str, wanted: Number, reference: str, question: str) -> bool:
    found = _final_number(text, asked_in(question, reference))
    if found is None or found.value != wanted.value:
        return False
    return found.mark in ("", wanted.mark) or asks_for(found.mark, question)


def gsm8k_format_reward(completions: Sequence[Text]) -> list[float]:
    """For each completion, 1.0 if the last line is `#### <number>` and contains the only `####`,
    else 0.0."""
    return [float(_ends_with_answer(text_of(completion))) for completion in completions]


def _final_number(text: str, asked: str) -> Number | None:
    """The number of the answer. Joined boxes must all have the same number."""
    answer = read_answer(text, asked)
    if answer is None:
        return None
    numbers = {read_numeral(part, asked) for part in answer.parts or (answer.text,)}
    return numbers.pop() if len(numbers) == 1 else None


def _read_references(given: Any, row: int | None = None) -> list[tuple[Number, str]]:
    """The accepted numbers and their texts."""
    read, where = [], "" if row is None else f" of row {row}"
    for reference in references_of(given):
        written = reference.rpartition(MARK)[2]
        number = read_numeral(written, asked_in("", written))
        if number is None:
            raise ValueError(
                f"the GSM8K answer{where} is {reference!r}; a reference needs exactly one "
                f"number, after {MARK} where it has that mark (column 'answer')"
            )
        read.append((number, written))
    return read


def _ends_with_answer(text: str) -> bool:
    before, _, after = text.rpartition(MARK)
    return (
        text.count(MARK) == 1
        and (before == "" or before.endswith("\n"))
        and _FINAL_LINE.fullmatch(after) is not None
        and read_numeral(after) is not None
    )
