"""The verifiable rewards of GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word
Problems"), whose references are worked solutions that end with `#### 42`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rloo.rewards.text import last_boxed, last_number, only_number, text_of
from rloo.types import Text

_MARK = "####"
_ANSWER_IS = re.compile(r"answer is", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|\.(?:\s|$)")
_FINAL_LINE = re.compile(r" -?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?\s*")


def gsm8k_reward(
    completions: Sequence[Text], answer: Sequence[str | float | None]
) -> list[float | None]:
    r"""1.0 if the completion's final number equals the reference, else 0.0.

    The final number is the one after the last `####`; without that mark, the one in the last
    `\boxed{}`; without a box, the one in the sentence after the last "answer is"; failing all of
    these, the last number of the text. In the first three places there must be exactly one number:
    "42 or 41" is wrong. Numbers are compared exactly, as fractions. The reward is None where the
    reference is None. Raises ValueError for a reference that does not have exactly one number
    after its `####` (or, without that mark, in its whole text).
    """
    references = [_read_reference(reference, row) for row, reference in enumerate(answer)]
    return [
        None if wanted is None else float(_final_number(text_of(completion)) == wanted)
        for completion, wanted in zip(completions, references, strict=True)
    ]


def gsm8k_format_reward(completions: Sequence[Text]) -> list[float]:
    """1.0 if the last line is `#### <number>` and contains the only `####`, else 0.0."""
    return [float(_ends_with_answer(text_of(completion))) for completion in completions]


def _final_number(text: str) -> Fraction | None:
    if _MARK in text:
        return only_number(text.rpartition(_MARK)[2])
    boxed = last_boxed(text)
    if boxed is not None:
        return only_number(boxed)
    *_, after = _ANSWER_IS.split(text)
    if after != text:
        return only_number(_SENTENCE_END.split(after.lstrip(" :*\n\t"), maxsplit=1)[0])
    return last_number(text)


def _read_reference(reference: str | float | None, row: int) -> Fraction | None:
    if reference is None:
        return None
    number = only_number(str(reference).rpartition(_MARK)[2])
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
        and only_number(after) is not None
    )
