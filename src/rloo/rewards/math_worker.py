"""The process in which math-verify reads hostile text, so that a hang or crash costs only this one.

Run by path, it reads one JSON pair per line, reference and candidate texts, and replies `true`,
`false` or `null` (the reference cannot be read). It kills itself when a pair misses the deadline.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
from typing import Any

_MEMORY_BYTES = 2 << 30


def serve(seconds: float) -> None:
    """Reply until the input ends. `seconds` is the deadline for one pair."""
    from math_verify import LatexExtractionConfig, parse, verify

    # LaTeX only: math-verify evaluates plain expressions with sympy's parse_expr: eval.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[Any]:
        return parse(text, latex, extraction_mode="first_match", parsing_timeout=None)

    def judge(reference: str, candidates: list[str]) -> bool | None:
        gold = read(reference)
        answer = next(filter(None, map(read, candidates)), [])
        return bool(verify(gold, answer, timeout_seconds=None)) if gold else None

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    answers.write("ready\n")
    with open(os.devnull, "w") as silence:
        os.dup2(silence.fileno(), 1)
        os.dup2(silence.fileno(), 2)
        for line in sys.stdin:
            # faulthandler's thread needs no interpreter lock, so it also ends one enormous power.
            faulthandler.dump_traceback_later(seconds, exit=True, file=silence)
            verdict = judge(*json.loads(line))
            faulthandler.cancel_dump_traceback_later()
            answers.write(json.dumps(verdict) + "\n")


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system: only the deadline protects
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    _limit_memory()
    serve(float(sys.argv[1]))
