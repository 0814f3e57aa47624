r"""The reward of mathematical equivalence.

This module decides which part of a completion is the answer and whether it has the form of one.
Numbers it compares itself, exactly; other forms are judged by math-verify in processes that may
hang, crash and need too much memory.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rloo.rewards.answers import Reference
from rloo.rewards.numerals import last_numeral_said
from rloo.rewards.text import last_boxed, question_of, text_of
from rloo.rewards.wording import asked_in, boxed_answer
from rloo.types import Text

_MAX_CHARACTERS = 1000
_MAX_WORKERS = 8
_SECONDS_PER_ANSWER = 0.1
_START_SECONDS, _REPLY_SECONDS = 120.0, 1.0
_NO_REFERENCE = "the reward 'math' needs the reference in a column 'answer' or 'solution'"
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def make_math(*, seconds: float = 5.0) -> MathReward:
    """A `MathReward` that gives one call about `seconds` for all its completions together."""
    if not 0 < seconds <= 3600:
        raise ValueError(
            f"seconds is {seconds}; the time of a call needs to be above 0 and at most 3600 "
            "(option of math)"
        )
    if not hasattr(os, "fork"):
        raise ValueError("the reward 'math' needs os.fork, which this system does not have")
    return MathReward(seconds)


class MathReward:
    r"""1.0 if the answer equals the column `answer` (or else `solution`), otherwise 0.0.

    The answer is the last `\boxed{...}`, of at most 1,000 characters; without a box, the last LaTeX
    formula or the last number, whichever ends later, within the last 1,000 characters.

    It must be a number or a closed form of the kind that the reference is (docs/rewards.md). Two
    numbers are compared exactly; other forms are equal where math-verify finds them so, by up to
    `os.cpu_count()` judges (at most 8) side by side, within `seconds` for the whole call and 0.1 s
    more for each answer of a judge. An expression that takes a judge more than 0.5 s
    of processor time (0.25 s at first, the rest when all others are judged and time is left), or
    too much memory, scores 0.

    The reward is None where the reference is None or cannot be read, and where a judge was killed,
    stopped, or out of time before it had its share; the metric `rewards/math_reward/unjudged` is
    the share of these.
    """

    def __init__(self, seconds: float) -> None:
        self.__name__ = "math_reward"
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
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
        prompts: Sequence[Text] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | None]:
        wanted = answer if answer is not None else solution
        if wanted is None:
            raise ValueError(_NO_REFERENCE)
        questions = [""] * len(completions) if prompts is None else map(question_of, prompts)
        rewards: list[float | None] = []
        pairs: dict[tuple[str, str], list[int]] = {}
        for text, given, question in zip(completions, wanted, questions, strict=True):
            found = None if given is None else _compare(text_of(text), str(given), question)
            if isinstance(found, tuple):
                pairs.setdefault(found, []).append(len(rewards))
                found = None
            rewards.append(found)
        unjudged = 0
        for rows, verdict in zip(pairs.values(), self._judge(list(pairs)), strict=True):
            for row in rows:
                rewards[row] = None if verdict is None else float(verdict)
            unjudged += len(rows) if verdict is None else 0
        if log_metric is not None and completions:
            log_metric("rewards/math_reward/unjudged", unjudged / len(completions))
        return rewards

    def close(self) -> None:
        """End the worker process; the next call starts a new one."""
        self._end()
        self._process = None

    def _judge(self, pairs: list[tuple[str, str]]) -> list[bool | None]:
        verdicts: list[bool | None] = [None] * len(pairs)
        if pairs:
            workers = min(os.cpu_count() or 1, _MAX_WORKERS)
            budget = self._seconds + _SECONDS_PER_ANSWER * len(pairs)
            request = {"pairs": pairs, "budget": budget, "workers": workers}
            for line in self._ask(json.dumps(request).encode() + b"\n", budget):
                index, verdict = json.loads(line)
                verdicts[index] = verdict
        return verdicts

    def _ask(self, request: bytes, seconds: float) -> list[bytes]:
        """The lines that the worker replies with, as far as it does in time."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process, end = self._process, b"\n\n"
        # A worker that was stopped reads nothing, and the pipe holds less than a long request.
        threading.Thread(target=_write, args=(process.stdin, request), daemon=True).start()
        try:
            reply = b"\n" + _read(process, end, seconds + _REPLY_SECONDS, b"\n")
        except BaseException:  # Ctrl-C: the pending reply must not be taken for that of the next
            self.close()
            raise
        if not reply.endswith(end):
            self.close()
        return [line for line in reply.rpartition(b"\n")[0].split(b"\n") if line]

    def _start(self) -> subprocess.Popen[bytes]:
        # Not multiprocessing: spawn and forkserver run the user's script a second time if it has no
        # `__main__` guard. -P keeps this folder, which has a math.py, off the module path.
        self._end()
        worker = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # one group, to be killed as one; Ctrl-C is ours alone
        )
        self._end = weakref.finalize(self, _end, process)
        if _read(process, b"ready\n", _START_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError(
                "the worker of the reward 'math' did not start: math-verify could not be imported "
                f"within {_START_SECONDS:g} s (its error is above)"
            )
        return process


def _write(pipe: Any, request: bytes) -> None:
    with suppress(OSError, ValueError):  # the worker ended, its pipe was closed
        pipe.write(request)
        pipe.flush()


def _read(
    process: subprocess.Popen[bytes], end: bytes, seconds: float, before: bytes = b""
) -> bytes:
    """What the process writes up to `end` (of `before` and it), its end or the deadline."""
    assert process.stdout is not None
    number, read, deadline = process.stdout.fileno(), b"", time.monotonic() + seconds
    poll = select.poll()
    poll.register(number, select.POLLIN)
    while not (before + read).endswith(end):
        left = deadline - time.monotonic()
        chunk = os.read(number, 1 << 16) if left > 0 and poll.poll(1000 * left) else b""
        if not chunk:
            break
        read += chunk
    return read


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # an unsent request to a dead worker
                pipe.close()


def _compare(text: str, given: str, question: str) -> float | tuple[str, str] | None:
    """The reward, None if the reference cannot be read, or the LaTeX of both for a judge."""
    if len(given) > _MAX_CHARACTERS:
        return None
    boxed = last_boxed(given)
    reference = Reference(given if boxed is None else boxed, question)
    if not reference.is_readable:
        return None
    answer = _find_answer(text, asked_in(question))
    if answer is None or len(answer) > _MAX_CHARACTERS:
        return 0.0
    verdict = reference.judge(answer)
    return verdict if isinstance(verdict, tuple) else float(verdict)


def _find_answer(text: str, asked: str) -> str | None:
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    text = text[-_MAX_CHARACTERS:]
    formulas, number = list(_FORMULA.finditer(text)), last_numeral_said(text, asked)
    if formulas and (number is None or number.end < formulas[-1].end()):
        return next(group for group in formulas[-1].groups() if group is not None)
    return None if number is None else number.text
