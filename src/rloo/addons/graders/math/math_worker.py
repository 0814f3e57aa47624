"""Runs math-verify on hostile text in separate processes, which may hang or crash.

The process is a worker (`rloo.distributed.worker_process`). A call is JSON,
`{"budget": seconds, "limit": seconds, "workers": n, "pairs": [[reference, answer], ...]}`.
The reply is a list with the verdict on each pair: true, false or null.

The worker imports math-verify once and forks parallel judges. The setup has the limit of CPU
seconds for the import. The time of a judge is CPU time, so other load on the machine does not
reduce it. When the time is over, the kernel ends the judge with SIGPROF. `budget` is each judge's
time for all pairs; `limit` is wall-clock time. The verdict on an answer that takes too long or
needs too much memory is false. The verdict is null for causes outside the answer: the reference is
unreadable, a judge was stopped or died for another reason, or the budget was used up before the
pair.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_MEMORY_BYTES = 2 << 30
# CPU seconds. Correct answers take 0.02 to 0.15 s. A pair that is not finished in the first try has
# a second try after all other pairs.
_FIRST_SECONDS, _SECOND_SECONDS = 0.25, 0.5
# Number of compared digits, and relative tolerances of equal numbers: exact ones, and decimals.
_DIGITS, _EXACT, _ROUNDED = 80, 1e-70, 1e-3
_ROUNDED_TO = r"\approx"
_FORK = multiprocessing.get_context("fork")
# One example of each kind of expression, so that all modules are imported before the first fork.
_EXAMPLES = (
    (r"2\sqrt{2}+\frac{\pi}{4}", r"\sqrt{8}+0.25\pi"),
    (r"x^2+2x\sin(x)+\log_2 3", r"(x+1)^2-\ln 5"),
    (r"(1,\frac{1}{2})", "(1,0.6)"),
    (r"[0,1)\cup(2,\infty)", r"[0,1]\cup(2,3)"),
    (r"\{1,2\}", r"\{2,3\}"),
    (r"y=2x+3", "y=3x-1"),
    (r"x \le 2", "x > 2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("3+4i", r"e^{i\pi/3}"),
    (r"\binom{5}{2}x+3!", r"10x+7"),
    (r"50\%", r"90^\circ"),
)


class MathWorker:
    """A forked process that judges one pair at a time."""

    def __init__(self, verifier: Verifier, others: list[MathWorker]) -> None:
        self.connection: Connection
        self.connection, theirs = _FORK.Pipe()
        ends = [self.connection, *(other.connection for other in others)]
        self.process: BaseProcess = _FORK.Process(target=_judge_all, args=(verifier, theirs, ends))
        self.process.start()
        theirs.close()
        self.index: int | None = None
        self.seconds: float = 0.0
        self.spent: float = 0.0
        self.at_answer: bool = False

    def give(self, index: int, pair: list[str], seconds: float) -> None:
        """Start judging a pair, with at most `seconds` of CPU time."""
        self.index, self.seconds, self.at_answer = index, seconds, False
        _send(self.connection, [seconds, *pair])

    def hear(self) -> str | bool | None:
        """The judge's next message: a verdict, "answer" (the reference was parsed), or "slow" (the
        pair took too long); None if the judge died. Sets `spent` to the pair's CPU time."""
        try:
            message, self.spent = _receive(self.connection)
        except (EOFError, OSError):
            self.end()
            self.spent = self.seconds
            return "slow" if self.process.exitcode == -signal.SIGPROF else None
        self.at_answer = self.at_answer or message == "answer"
        return message

    def end(self) -> None:
        """Kill the process if it is alive."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def judge_pairs(
    pairs: list[list[str]],
    budget: float,
    limit: float,
    workers: int,
    verifier: Verifier,
    judges: list[MathWorker],
) -> Iterator[tuple[int, bool | None]]:
    """Yield (index, verdict) of each pair that is decided within `budget` CPU seconds per judge and
    `limit` wall-clock seconds. `judges` has the judges of earlier calls; afterwards it has the
    living judges of this call."""
    end = time.monotonic() + limit
    workers = min(workers, len(pairs))
    left = budget * workers
    waiting = deque((index, _FIRST_SECONDS) for index in range(len(pairs)))
    slow: dict[int, bool | None] = {}  # verdicts of pairs that stay slow
    while (waiting and left > 0) or any(judge.index is not None for judge in judges):
        for judge in [j for j in judges if j.index is None and not j.process.is_alive()]:
            judge.end()
            judges.remove(judge)
        while waiting and len(judges) < workers:
            judges.append(MathWorker(verifier, judges))
        for judge in judges:
            if judge.index is None and waiting and left > 0:
                number, seconds = waiting.popleft()
                judge.give(number, pairs[number], seconds)
        busy: dict[Any, MathWorker] = {j.connection: j for j in judges if j.index is not None}
        ready = wait(list(busy), max(0.0, end - time.monotonic()))
        if not ready:
            break
        for judge in map(busy.__getitem__, ready):
            said, index = judge.hear(), judge.index
            if said == "answer" or index is None:
                continue
            judge.index = None
            left -= judge.spent
            if said == "slow":
                slow[index] = False if judge.at_answer else None
                if judge.seconds == _FIRST_SECONDS:
                    waiting.append((index, _SECOND_SECONDS))
            else:
                slow.pop(index, None)
                yield index, said if isinstance(said, bool) else None
            if judge.connection.closed:
                judges.remove(judge)
    for judge in [judge for judge in judges if judge.index is not None]:
        judge.end()
        judges.remove(judge)
    yield from slow.items()


def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


class Verifier:
    """math-verify, imported and warmed up: the first parse takes as long as 50 later ones."""

    def __init__(self) -> None:
        import math_verify
        import sympy

        # Only LaTeX: math-verify passes plain expressions to sympy's parse_expr, which uses eval.
        # math-verify's units are disabled, since it reads final letters as units (2t is 2). Our
        # code removes units before.
        plain = math_verify.LatexExtractionConfig(boxed_match_priority=0)
        letters = replace(plain.normalization_config, units=False)
        self._latex = [replace(plain, normalization_config=letters)]
        self._parse, self._verify, self._sympy = math_verify.parse, math_verify.verify, sympy
        self._zero = [sympy.Integer(0)]
        self.read_gold: Callable[[str], list[Any]] = lru_cache(maxsize=16)(self._read_gold)
        for gold, answer in _EXAMPLES:
            self.is_equal(self._read_gold(f"${gold}$"), f"${answer}$")

    def is_equal(self, gold: list[Any], answer: str) -> bool:
        """Whether each line of an answer equals the parsed reference. A line with a sign of
        approximation is compared with the rounded reference."""
        return all(
            self._is_rounded(gold, line.removeprefix(_ROUNDED_TO))
            if line.startswith(_ROUNDED_TO)
            else self._is_one_equal(gold, line)
            for line in answer.split("\n")
        )

    def _is_rounded(self, gold: list[Any], decimals: str) -> bool:
        value, step = gold[0], 10.0 ** -len(decimals.partition(".")[2].strip())
        if not isinstance(value, self._sympy.Expr) or not value.is_number:
            return False
        number = self._sympy.Rational(decimals.replace(",", "").strip())
        return bool(abs(value.evalf(_DIGITS) - number) <= 0.5001 * step)

    def _is_one_equal(self, gold: list[Any], answer: str) -> bool:
        read = self._read(answer)
        # math-verify rounds differences of numbers to 15 decimals, so 1/2006! equals 0 for it.
        return bool(self._verify(gold, read, timeout_seconds=None)) and self._is_near(gold, read)

    def _is_near(self, gold: list[Any], answer: list[Any]) -> bool:
        """Whether the numbers in two answers that math-verify calls equal are within a relative
        tolerance."""
        one, other = gold[0], answer[0]
        named = [side for side in (one, other) if isinstance(side, self._sympy.Eq)]
        if len({side.lhs for side in named}) > 1:  # solved or scaled forms of one equation
            return True
        one, other = (side.rhs if side in named else side for side in (one, other))
        if type(one) is not type(other) and not (
            isinstance(one, self._sympy.Expr) and isinstance(other, self._sympy.Expr)
        ):
            return True
        return _are_near(self._sympy, one, other)

    def _read_gold(self, text: str) -> list[Any]:
        gold = self._read(text)
        # Compare once before any answer: a reference that is too hard to compare is no error of an
        # answer.
        self._verify(gold, self._zero, timeout_seconds=None)
        return gold

    def _read(self, text: str) -> list[Any]:
        return self._parse(text, self._latex, extraction_mode="first_match", parsing_timeout=None)


def _are_near(sympy: Any, one: Any, other: Any) -> bool:
    if isinstance(one, sympy.FiniteSet):
        return all(any(_are_near(sympy, a, b) for b in other.args) for a in one.args)
    if isinstance(one, sympy.MatrixBase):
        return all(_are_near(sympy, a, b) for a, b in zip(one.flat(), other.flat(), strict=True))
    if isinstance(one, (sympy.Tuple, sympy.Interval)):
        pairs = zip(one.args, other.args, strict=True)
        return all(_are_near(sympy, a, b) for a, b in pairs if isinstance(a, sympy.Expr))
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)) or one == other:
        return True
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    at = {name: sympy.Rational(3 * n + 7, 2 * n + 5) for n, name in enumerate(names)}
    a, b = (side.doit().subs(at).evalf(_DIGITS) for side in (one, other))
    if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
        return True
    is_rounded = one.has(sympy.Float) or other.has(sympy.Float)
    return bool(abs(a - b) <= (_ROUNDED if is_rounded else _EXACT) * max(abs(a), abs(b)))


def _judge_all(verifier: Verifier, connection: Connection, inherited: list[Connection]) -> None:
    """Judge pairs until the pipe is closed."""
    # Inherited pipes would keep other judges alive after the end of the serving process, and would
    # keep its parent's channel open after a kill.
    for other in inherited:
        other.close()
    number = connection.fileno()
    os.closerange(3, number)
    os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while True:
        try:
            seconds, reference, answer = _receive(connection)
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        started = time.process_time()
        # math-verify returns False if memory or recursion depth is exceeded.
        gold, verdict = verifier.read_gold(reference), None
        if gold:
            _send(connection, ["answer", 0.0])
            verdict = verifier.is_equal(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(connection, [verdict, time.process_time() - started])


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """Import math-verify and return the function that answers calls; see
    `rloo.distributed.worker_main`."""
    logging.disable(logging.CRITICAL)
    signal.setitimer(signal.ITIMER_PROF, float(setup))  # CPU time limit of the import
    _limit_memory()
    verifier = Verifier()
    signal.setitimer(signal.ITIMER_PROF, 0)
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
    judges: list[MathWorker] = []

    def answer(message: bytes) -> bytes:
        if not message:  # the parent only checks that the worker is ready
            return b""
        request = json.loads(message)
        verdicts: list[bool | None] = [None] * len(request["pairs"])
        for index, verdict in judge_pairs(**request, verifier=verifier, judges=judges):
            verdicts[index] = verdict
        return json.dumps(verdicts).encode()

    return answer


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
