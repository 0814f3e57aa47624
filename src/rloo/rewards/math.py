"""The reward of mathematical equivalence, judged by math-verify in a process of its own, whose
hangs, crashes and excessive memory use this module survives."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo.rewards.text import last_boxed, last_number, text_of
from rloo.types import Text

_MAX_CHARACTERS = 1000
_NO_REFERENCE = "the reward 'math' needs the reference in a column 'answer' or 'solution'"
_LATEX_MARKS = ("$", "\\(", "\\[", "\\boxed")


def make_math(*, seconds: float = 5.0) -> MathReward:
    """A `MathReward` that gives every completion at most `seconds`."""
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}; a deadline needs to be above 0 (option of math)")
    return MathReward(seconds)


class MathReward:
    r"""1.0 if the answer equals the column `answer` (or else `solution`), otherwise 0.0.

    The answer is the last `\boxed{...}`, of at most 1,000 characters; without a box, the last LaTeX
    formula, or else the last number, within the last 1,000 characters. The reward is None if the
    reference is None or cannot be read, and if math-verify missed the deadline, needed too much
    memory or crashed. The judgement is as generous as math-verify's: `\boxed{40+2}` equals 42.
    """

    def __init__(self, seconds: float) -> None:
        self.__name__ = "math_reward"
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], Any] = lambda: None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError when the dataset has neither `answer` nor `solution`."""
        if not {"answer", "solution"} & set(columns):
            given = ", ".join(columns) or "no column"
            raise ValueError(f"{_NO_REFERENCE}; the dataset has: {given}")

    def __call__(
        self,
        completions: Sequence[Text],
        answer: Sequence[str | float | None] | None = None,
        solution: Sequence[str | float | None] | None = None,
    ) -> list[float | None]:
        references = answer if answer is not None else solution
        if references is None:
            raise ValueError(_NO_REFERENCE)
        return [
            None if reference is None else self._score(text_of(completion), str(reference))
            for completion, reference in zip(completions, references, strict=True)
        ]

    def close(self) -> None:
        """End the worker process; the next call starts a new one."""
        self._end()
        self._process = None

    def _score(self, text: str, reference: str) -> float | None:
        candidates = _list_candidates(text)
        if not candidates:
            return 0.0
        if len(reference) > _MAX_CHARACTERS:
            return None
        if not any(mark in reference for mark in _LATEX_MARKS):
            reference = f"${reference}$"
        verdict = self._ask(json.dumps([reference, candidates]))
        return None if verdict is None else float(verdict)

    def _ask(self, request: str) -> bool | None:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        except BaseException:  # Ctrl-C: the pending reply must not be taken for that of the next
            self.close()
            raise
        if not reply:
            self.close()
            return None
        return json.loads(reply)

    def _start(self) -> subprocess.Popen[str]:
        # Not multiprocessing: spawn and forkserver run the user's script a second time if it has no
        # `__main__` guard. -P keeps this folder, which has a math.py, off the module path.
        worker = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(worker), str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        self._end = weakref.finalize(self, _end, process)
        if process.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError(
                "the worker of the reward 'math' did not start: math-verify could not be imported "
                "(its error is above)"
            )
        self._process = process
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # an unsent request to a dead worker
                pipe.close()


def _list_candidates(text: str) -> list[str]:
    boxed = last_boxed(text)
    if boxed is not None:
        return [f"\\boxed{{{boxed}}}"] if 0 < len(boxed) <= _MAX_CHARACTERS else []
    text = text[-_MAX_CHARACTERS:]
    number = last_number(text)
    formula = [text] if any(mark in text for mark in _LATEX_MARKS) else []
    return formula if number is None else [*formula, f"${number}$"]
