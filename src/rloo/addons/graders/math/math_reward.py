r"""The reward for mathematical equivalence.

This module extracts the answer and checks its form. It compares numbers exactly. math-verify judges
other forms in separate processes, since it may hang, crash or run out of memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rloo.addons.graders.math.answer_equality import ReferenceAnswer, references_of
from rloo.addons.graders.math.answer_extraction import TAGS, answer_of_reference, read_answer
from rloo.addons.graders.math.numbers import MAX_CHARACTERS
from rloo.addons.graders.math.wording import asked_in
from rloo.distributed.worker_pool import WorkerPool, wait_result
from rloo.distributed.worker_process import LocalWorker, Worker, WorkerDied
from rloo.rewards.completion_text import question_of, text_of
from rloo.types import Text

_MAX_WORKERS = 8
_SECONDS_PER_ANSWER = 0.1
# The additional wall-clock time of a call on a busy machine: this multiple of the CPU time budget,
# at most this many seconds.
_MOST_TIMES, _MOST_SECONDS = 9.0, 120.0
# CPU and wall-clock limits of the worker's start, and the time for a reply, in seconds.
_START_PROCESSOR, _START_SECONDS, _REPLY_SECONDS = 60.0, 1800.0, 1.0
_WORKER = "rloo.addons.graders.math.math_worker:serve"
_NO_REFERENCE = "the reward 'math' needs the reference in a column 'answer' or 'solution'"


def make_math(*, seconds: float = 5.0) -> MathReward:
    """Make a `MathReward`. Each of its math-verify processes has about `seconds` of CPU time per
    call."""
    if not 0 < seconds <= 3600:
        raise ValueError(
            f"seconds is {seconds}; the time of a call needs to be above 0 and at most 3600 "
            "(option of math)"
        )
    if not hasattr(os, "fork"):
        raise ValueError("the reward 'math' needs os.fork, which this system does not have")
    return MathReward(seconds)


class MathReward:
    r"""A reward function: 1.0 if the answer equals the column `answer` (or else `solution`),
    otherwise 0.0.

    The answer is the last `\boxed{...}`, of at most 1,000 characters. Without a box it is the last
    LaTeX formula or the last number, whichever ends later, in the last 1,000 characters.

    The answer must be a number or a closed form of the reference's kind (docs/rewards.md). Two
    numbers are compared exactly. For other forms math-verify decides, in `os.cpu_count()` parallel
    judges (at most 8). Each judge has `seconds` of CPU time per call, plus 0.1 s per answer. The
    wall-clock limit of a call, for a busy machine, is ten times this CPU time, but at most this CPU
    time plus 120 s. An expression has 0.25 s of a judge's CPU time. If this is too short, the
    expression is judged again with 0.5 s, provided that time is left after all other expressions.
    An expression that takes longer or needs too much memory scores 0.

    The reward is None if the reference is None or unreadable. It is also None if the judge of the
    answer was killed or stopped, or if the time of the call was over before the answer's turn. The
    metric `rewards/math_reward/unjudged` is the share of answers without a judge's verdict.
    """

    def __init__(self, seconds: float) -> None:
        self.__name__ = "math_reward"
        self.seeks = TAGS
        self._seconds = seconds
        self._pool: WorkerPool | None = None

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ValueError when the dataset has neither `answer` nor `solution`."""
        if not {"answer", "solution"} & set(columns):
            given = ", ".join(columns) or "no column"
            raise ValueError(f"{_NO_REFERENCE}; the dataset has: {given}")

    def check_row(self, row: Mapping[str, Any]) -> Any:
        """The reference of a row if it cannot be read, else None."""
        given = row.get("answer") if "answer" in row else row.get("solution")
        texts = references_of(given)
        return given if texts and not read_references(tuple(texts), "") else None

    def __call__(
        self,
        completions: Sequence[Text],
        answer: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        prompts: Sequence[Text] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | None]:
        wanted = answer if answer is not None else solution
        if wanted is None:
            raise ValueError(_NO_REFERENCE)
        questions = [""] * len(completions) if prompts is None else map(question_of, prompts)
        found = [
            _compare(text_of(text), given, question)
            for text, given, question in zip(completions, wanted, questions, strict=True)
        ]
        asked = dict.fromkeys(pair for pairs in found if isinstance(pairs, list) for pair in pairs)
        judged = dict(zip(asked, self._judge(list(asked)), strict=True))
        rewards = [
            _any([judged[pair] for pair in pairs]) if isinstance(pairs, list) else pairs
            for pairs in found
        ]
        unjudged = sum(
            reward is None and isinstance(pairs, list)
            for reward, pairs in zip(rewards, found, strict=True)
        )
        if log_metric is not None and completions:
            log_metric("rewards/math_reward/unjudged", unjudged / len(completions))
        return [None if reward is None else float(reward) for reward in rewards]

    def close(self) -> None:
        """Stop the worker process. The next call starts a new worker process."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _judge(self, pairs: list[tuple[str, str]]) -> list[bool | None]:
        """The verdicts on pairs. All verdicts are None if the worker was lost."""
        if not pairs:
            return []
        workers = min(os.cpu_count() or 1, _MAX_WORKERS)
        budget = self._seconds + _SECONDS_PER_ANSWER * len(pairs)
        limit = budget + min(_MOST_TIMES * budget, _MOST_SECONDS)
        request = {"pairs": pairs, "budget": budget, "limit": limit, "workers": workers}
        if self._pool is None:
            self._pool = WorkerPool(1, _start_worker)
        message = json.dumps(request).encode()
        # No second try: the pairs that exhausted the time of one call would exhaust it again.
        future = self._pool.submit(
            lambda worker: worker.call(message, limit + _REPLY_SECONDS), tries=1
        )
        try:
            return list(json.loads(wait_result(future)))
        except WorkerDied:
            return [None] * len(pairs)
        except BaseException:  # Ctrl-C: the next call must not wait for this one
            self.close()
            raise


def _start_worker() -> Worker:
    """A worker that has imported math-verify. Raises RuntimeError if the import fails."""
    seconds = str(_START_PROCESSOR).encode()
    worker = LocalWorker("of the reward 'math'", _WORKER, seconds, group=True)
    try:
        worker.call(b"", _START_SECONDS)
    except Exception as error:
        worker.end()
        raise RuntimeError(
            "the worker of the reward 'math' did not start: math-verify could not be imported "
            f"(its error is above), or not within {_START_PROCESSOR:g} s of the processor"
        ) from error
    return worker


def _any(verdicts: list[bool | None]) -> bool | None:
    return True if True in verdicts else (None if None in verdicts else False)


def _compare(text: str, given: Any, question: str) -> bool | list[tuple[str, str]] | None:
    """Whether the answer is correct, or None if no reference is readable. If math-verify must
    decide, a list with (reference, answer) as LaTeX for each reference that may match."""
    references = read_references(tuple(references_of(given)), question)
    if not references:
        return None
    answer = read_answer(text, asked_in(question))
    if answer is None:
        return False
    pairs = []
    for reference in references:
        parts = [reference.judge(part) for part in answer.parts if len(part) <= MAX_CHARACTERS]
        if parts and parts == [True] * len(answer.parts):
            return True
        verdict = len(answer.text) <= MAX_CHARACTERS and reference.judge(answer.text)
        if verdict is True:
            return True
        pairs += [verdict] if isinstance(verdict, tuple) else []
    return pairs or False


@lru_cache(maxsize=1024)
def read_references(texts: tuple[str, ...], question: str) -> list[ReferenceAnswer]:
    """The accepted references, without unreadable ones."""
    read = []
    for text in texts:
        reference = ReferenceAnswer(answer_of_reference(text), question)
        read += [reference] if reference.is_readable else []
    return read
